// Token ids of a text, as Python computes them: CLIP's BPE, BERT's WordPiece and the character tokenizer.
// Reads tokenizer.json of `m1clip export RUN --to coreml`.
import Foundation

enum ClipError: Error {
    case unsupported(String)
    case damaged(String)
}

struct Tokenizer {
    static let start = "<|startoftext|>"
    static let end = "<|endoftext|>"
    static let unknown = "<unk>"
    static let endOfWord = "</w>"
    // Words of a lowercased text; what matches nothing (spaces) is dropped.
    static let wordPattern = #"'[sſ]|'t|'re|'ve|'m|'ll|'d|\p{L}+|\p{N}|[^\s\p{L}\p{N}\u0345]+"#

    private enum Kind {
        case bpe(ranks: [String: Int])  // of the merges, by "left right"
        case wordPiece(WordPiece)
        case characters  // one token each
    }

    private let kind: Kind
    private let vocabulary: [String: Int32]
    private let startId: Int32
    private let endId: Int32

    init(contentsOf url: URL) throws {
        let json = try JSONSerialization.jsonObject(with: Data(contentsOf: url))
        guard let root = json as? [String: Any],
            let model = root["model"] as? [String: Any],
            let vocabulary = model["vocab"] as? [String: Int]
        else { throw ClipError.damaged(url.lastPathComponent) }
        self.vocabulary = vocabulary.mapValues(Int32.init)
        var (start, end) = (Tokenizer.start, Tokenizer.end)
        switch model["type"] as? String {
        case "BPE":
            // Older files have "left right", newer ones ["left", "right"].
            let lines = model["merges"] as? [String]
            let pairs = model["merges"] as? [[String]]
            guard let merges = lines ?? pairs?.map({ $0.joined(separator: " ") })
            else { throw ClipError.damaged("merges") }
            let ranked = merges.enumerated().map { ($1, $0) }
            kind = .bpe(ranks: Dictionary(uniqueKeysWithValues: ranked))
        case "WordPiece" where vocabulary[Tokenizer.unknown] != nil:
            kind = .characters
        case "WordPiece":
            kind = .wordPiece(try WordPiece(root, model, self.vocabulary))
            (start, end) = (WordPiece.start, WordPiece.end)
        default:
            throw ClipError.unsupported("this tokenizer: only BPE, WordPiece and characters are")
        }
        guard let startId = self.vocabulary[start], let endId = self.vocabulary[end]
        else { throw ClipError.damaged("start and end tokens") }
        self.startId = startId
        self.endId = endId
    }

    /// Start, text, end, and padding: always `length` ids.
    func encode(_ text: String, length: Int, padding: Int32) -> [Int32] {
        let ids: [Int32]
        switch kind {
        case .bpe(let ranks): ids = words(text).flatMap { merged($0, ranks) }
        case .wordPiece(let pieces): ids = pieces.encode(text)
        case .characters: ids = characters(text)
        }
        let row = [startId] + ids.prefix(length - 2) + [endId]
        return row + Array(repeating: padding, count: length - row.count)
    }

    private func characters(_ text: String) -> [Int32] {
        // Each character alone: a sigma at the end of a word would become another letter.
        text.unicodeScalars.flatMap { scalar -> [Int32] in
            let lower = scalar == "Σ" ? "σ" : scalar.properties.lowercaseMapping
            return lower.unicodeScalars.map {
                vocabulary[String($0)] ?? vocabulary[Tokenizer.unknown]!
            }
        }
    }

    private func words(_ text: String) -> [String] {
        var cleaned = text.precomposedStringWithCanonicalMapping
        for (curly, straight) in [("“", "\""), ("”", "\""), ("‘", "'"), ("’", "'")] {
            cleaned = cleaned.replacingOccurrences(of: curly, with: straight)
        }
        cleaned = cleaned.lowercased()
        let pattern = try! NSRegularExpression(pattern: Tokenizer.wordPattern)
        let whole = cleaned as NSString  // a match may end inside a character of Swift
        let range = NSRange(location: 0, length: whole.length)
        return pattern.matches(in: cleaned, range: range).map { whole.substring(with: $0.range) }
    }

    /// The ids of a word: its bytes, joined by the merges in order of their rank.
    private func merged(_ word: String, _ ranks: [String: Int]) -> [Int32] {
        var parts = word.utf8.map { Tokenizer.byteLetters[Int($0)] }
        parts[parts.count - 1] += Tokenizer.endOfWord
        while parts.count > 1 {
            let pairs = (0..<parts.count - 1).map { ranks[parts[$0] + " " + parts[$0 + 1]] ?? Int.max }
            guard let best = pairs.min(), best < Int.max else { break }
            let place = pairs.firstIndex(of: best)!
            parts[place] += parts.remove(at: place + 1)
        }
        return parts.compactMap { vocabulary[$0] }
    }

    /// A letter for each byte: printable ones are written as themselves, the others from U+0100 on.
    static let byteLetters: [String] = {
        let printable = Set(Array(33...126) + Array(161...172) + Array(174...255))
        var next = 256
        return (0..<256).map { byte in
            var code = byte
            if !printable.contains(byte) {
                code = next
                next += 1
            }
            return String(UnicodeScalar(UInt32(code))!)
        }
    }()
}

/// The tokens of BERT, MiniLM and the model `general`: words, and pieces of rare words.
struct WordPiece {
    static let start = "[CLS]"
    static let end = "[SEP]"
    // Chinese characters, each of which is a word.
    static let ideographs: [ClosedRange<UInt32>] = [
        0x4E00...0x9FFF, 0x3400...0x4DBF, 0x20000...0x2A6DF, 0x2A700...0x2B73F, 0x2B740...0x2B81F,
        0x2B920...0x2CEAF, 0xF900...0xFAFF, 0x2F800...0x2FA1F,
    ]

    // By scalars: equal strings of Swift may have different ones, as a Korean syllable and its letters.
    private let vocabulary: [[Unicode.Scalar]: Int32]
    private let unknownId: Int32
    private let prefix: [Unicode.Scalar]  // of pieces that continue a word
    private let longest: Int  // characters of a word; longer ones are unknown

    /// `root` is tokenizer.json, `model` its "model".
    init(_ root: [String: Any], _ model: [String: Any], _ vocabulary: [String: Int32]) throws {
        let normalizer = root["normalizer"] as? [String: Any]
        guard normalizer?["type"] as? String == "BertNormalizer",
            normalizer?["lowercase"] as? Bool == true
        else { throw ClipError.unsupported("this tokenizer: WordPiece of lowercased texts only") }
        guard let unknown = model["unk_token"] as? String, let unknownId = vocabulary[unknown],
            let prefix = model["continuing_subword_prefix"] as? String,
            let longest = model["max_input_chars_per_word"] as? Int
        else { throw ClipError.damaged("WordPiece") }
        let pieces = vocabulary.map { (Array($0.key.unicodeScalars), $0.value) }
        self.vocabulary = Dictionary(uniqueKeysWithValues: pieces)
        self.unknownId = unknownId
        self.prefix = Array(prefix.unicodeScalars)
        self.longest = longest
    }

    func encode(_ text: String) -> [Int32] {
        words(normalized(text)).flatMap(pieces)
    }

    /// Without control characters and accents, in lowercase, with spaces around Chinese characters.
    private func normalized(_ text: String) -> String.UnicodeScalarView {
        var cleaned = String.UnicodeScalarView()
        for scalar in text.unicodeScalars where !isControl(scalar) {
            let spaced = WordPiece.ideographs.contains { $0.contains(scalar.value) }
            if spaced { cleaned.append(" ") }
            cleaned.append(isSpace(scalar) ? " " : scalar)
            if spaced { cleaned.append(" ") }
        }
        var result = String.UnicodeScalarView()
        for scalar in String(cleaned).decomposedStringWithCanonicalMapping.unicodeScalars
        where scalar.properties.generalCategory != .nonspacingMark {
            result.append(contentsOf: scalar.properties.lowercaseMapping.unicodeScalars)
        }
        return result
    }

    /// Words between spaces; each punctuation mark is one of its own.
    private func words(_ text: String.UnicodeScalarView) -> [[Unicode.Scalar]] {
        var found: [[Unicode.Scalar]] = [[]]
        for scalar in text {
            if isSpace(scalar) {
                found.append([])
            } else if isPunctuation(scalar) {
                found.append([scalar])
                found.append([])
            } else {
                found[found.count - 1].append(scalar)
            }
        }
        return found.filter { !$0.isEmpty }
    }

    /// The longest pieces from the left; the unknown token if something remains.
    private func pieces(_ word: [Unicode.Scalar]) -> [Int32] {
        guard word.count <= longest else { return [unknownId] }
        var ids: [Int32] = []
        var start = 0
        while start < word.count {
            let before = start > 0 ? prefix : []
            let ends = stride(from: word.count, to: start, by: -1)
            guard let end = ends.first(where: { vocabulary[before + word[start..<$0]] != nil })
            else { return [unknownId] }
            ids.append(vocabulary[before + word[start..<end]]!)
            start = end
        }
        return ids
    }

    private func isSpace(_ scalar: Unicode.Scalar) -> Bool {
        scalar.properties.isWhitespace
    }

    private func isControl(_ scalar: Unicode.Scalar) -> Bool {
        if scalar == "\t" || scalar == "\n" || scalar == "\r" { return false }
        switch scalar.properties.generalCategory {
        case .control, .format, .privateUse, .surrogate: return true
        default: return scalar.value == 0xFFFD
        }
    }

    private func isPunctuation(_ scalar: Unicode.Scalar) -> Bool {
        switch scalar.properties.generalCategory {
        case .connectorPunctuation, .dashPunctuation, .openPunctuation, .closePunctuation,
            .initialPunctuation, .finalPunctuation, .otherPunctuation:
            return true
        default:  // the symbols of ASCII, such as $ and +
            return scalar.isASCII && scalar.properties.generalCategory.isSymbol
        }
    }
}

extension Unicode.GeneralCategory {
    fileprivate var isSymbol: Bool {
        switch self {
        case .mathSymbol, .currencySymbol, .modifierSymbol, .otherSymbol: return true
        default: return false
        }
    }
}

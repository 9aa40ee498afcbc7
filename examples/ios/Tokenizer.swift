// Token ids of a text, as Python computes them: CLIP's BPE and the character tokenizer.
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

    private let vocabulary: [String: Int32]
    private let ranks: [String: Int]?  // of the merges, by "left right"; nil: one token per character
    private let startId: Int32
    private let endId: Int32

    init(contentsOf url: URL) throws {
        let json = try JSONSerialization.jsonObject(with: Data(contentsOf: url))
        guard let root = json as? [String: Any],
            let model = root["model"] as? [String: Any],
            let vocabulary = model["vocab"] as? [String: Int]
        else { throw ClipError.damaged(url.lastPathComponent) }
        self.vocabulary = vocabulary.mapValues(Int32.init)
        switch model["type"] as? String {
        case "BPE":
            // Older files have "left right", newer ones ["left", "right"].
            let lines = model["merges"] as? [String]
            let pairs = model["merges"] as? [[String]]
            guard let merges = lines ?? pairs?.map({ $0.joined(separator: " ") })
            else { throw ClipError.damaged("merges") }
            ranks = Dictionary(uniqueKeysWithValues: merges.enumerated().map { ($1, $0) })
        case "WordPiece" where vocabulary[Tokenizer.unknown] != nil:
            ranks = nil
        default:
            throw ClipError.unsupported("this tokenizer: only BPE and characters are")
        }
        guard let startId = self.vocabulary[Tokenizer.start],
            let endId = self.vocabulary[Tokenizer.end]
        else { throw ClipError.damaged("start and end tokens") }
        self.startId = startId
        self.endId = endId
    }

    /// Start, text, end, and padding: always `length` ids.
    func encode(_ text: String, length: Int, padding: Int32) -> [Int32] {
        let ids = ranks == nil ? characters(text) : words(text).flatMap(merged)
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
        let whole = NSRange(cleaned.startIndex..., in: cleaned)
        return pattern.matches(in: cleaned, range: whole).map {
            String(cleaned[Range($0.range, in: cleaned)!])
        }
    }

    /// The ids of a word: its bytes, joined by the merges in order of their rank.
    private func merged(_ word: String) -> [Int32] {
        var parts = word.utf8.map { Tokenizer.byteLetters[Int($0)] }
        parts[parts.count - 1] += Tokenizer.endOfWord
        while parts.count > 1 {
            let pairs = (0..<parts.count - 1).map { ranks![parts[$0] + " " + parts[$0 + 1]] ?? Int.max }
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

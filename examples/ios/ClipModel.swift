// Vectors of images and texts with the two packages of `m1clip export RUN --to coreml`.
import CoreGraphics
import CoreML
import CoreVideo
import Foundation

/// preprocess.json of the export.
struct Settings: Decodable {
    struct ImageRule: Decodable {
        let image_size: Int
        let resize: String  // squash...: stretched to a square; shortest...: middle cropped; ...-bilinear
    }
    let image: ImageRule  // the package itself normalizes: pixels stay between 0 and 255
    let context_length: Int
    let pad_id: Int32
}

final class ClipModel {
    private let imageModel: MLModel
    private let textModel: MLModel
    private let tokenizer: Tokenizer
    private let settings: Settings

    /// The resources of an app: Xcode compiles image.mlpackage to image.mlmodelc, and text.mlpackage too.
    init(bundle: Bundle = .main) throws {
        func resource(_ name: String, _ ending: String) throws -> URL {
            guard let url = bundle.url(forResource: name, withExtension: ending)
            else { throw ClipError.damaged("\(name).\(ending) is not in the app") }
            return url
        }
        imageModel = try MLModel(contentsOf: resource("image", "mlmodelc"))
        textModel = try MLModel(contentsOf: resource("text", "mlmodelc"))
        tokenizer = try Tokenizer(contentsOf: resource("tokenizer", "json"))
        let data = try Data(contentsOf: resource("preprocess", "json"))
        settings = try JSONDecoder().decode(Settings.self, from: data)
    }

    func encode(text: String) throws -> [Float] {
        let length = settings.context_length
        let ids = tokenizer.encode(text, length: length, padding: settings.pad_id)
        let tokens = try MLMultiArray(shape: [1, NSNumber(value: length)], dataType: .int32)
        for (place, id) in ids.enumerated() { tokens[place] = NSNumber(value: id) }
        return try vector(of: textModel, input: "tokens", value: MLFeatureValue(multiArray: tokens))
    }

    /// The image must be upright: draw photos of a camera with their orientation first.
    func encode(image: CGImage) throws -> [Float] {
        let pixels = try pixelBuffer(of: image)
        return try vector(of: imageModel, input: "image", value: MLFeatureValue(pixelBuffer: pixels))
    }

    private func vector(of model: MLModel, input: String, value: MLFeatureValue) throws -> [Float] {
        let inputs = try MLDictionaryFeatureProvider(dictionary: [input: value])
        let output = try model.prediction(from: inputs)
        guard let vector = output.featureValue(for: "vector")?.multiArrayValue
        else { throw ClipError.damaged("a package without the output vector") }
        return (0..<vector.count).map { vector[$0].floatValue }
    }

    private func pixelBuffer(of image: CGImage) throws -> CVPixelBuffer {
        let side = settings.image.image_size
        var created: CVPixelBuffer?
        CVPixelBufferCreate(nil, side, side, kCVPixelFormatType_32BGRA, nil, &created)
        guard let buffer = created else { throw ClipError.damaged("no memory for an image") }
        CVPixelBufferLockBaseAddress(buffer, [])
        defer { CVPixelBufferUnlockBaseAddress(buffer, []) }
        guard
            let context = CGContext(
                data: CVPixelBufferGetBaseAddress(buffer), width: side, height: side,
                bitsPerComponent: 8, bytesPerRow: CVPixelBufferGetBytesPerRow(buffer),
                space: CGColorSpace(name: CGColorSpace.sRGB)!,
                bitmapInfo: CGImageAlphaInfo.noneSkipFirst.rawValue
                    | CGBitmapInfo.byteOrder32Little.rawValue)
        else { throw ClipError.damaged("no bitmap for an image") }
        context.interpolationQuality = settings.image.resize.hasSuffix("bilinear") ? .medium : .high
        let place = placement(
            width: image.width, height: image.height, side: side, resize: settings.image.resize)
        context.draw(image, in: place)
        return buffer
    }
}

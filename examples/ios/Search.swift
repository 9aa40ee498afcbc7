// The place of an image in the square that the model sees, and search among vectors.
import Foundation

/// Where the complete image is drawn so that the square shows what the model was trained on.
/// Core Graphics counts y from the bottom; the crop of Python counts from the top.
func placement(width: Int, height: Int, side: Int, resize: String) -> CGRect {
    if resize.hasPrefix("squash") { return CGRect(x: 0, y: 0, width: side, height: side) }
    let shorter = min(width, height)
    let wide = width == shorter ? side : side * width / shorter
    let high = height == shorter ? side : side * height / shorter
    let rounding: FloatingPointRoundingRule = resize.contains("-floor") ? .down : .toNearestOrEven
    let left = (Double(wide - side) / 2).rounded(rounding)
    let top = (Double(high - side) / 2).rounded(rounding)
    return CGRect(x: -left, y: top - Double(high - side), width: Double(wide), height: Double(high))
}

/// Vectors have length 1: the cosine is the sum of products.
func cosine(_ one: [Float], _ other: [Float]) -> Float {
    zip(one, other).map(*).reduce(0, +)
}

/// The places of the nearest vectors, the nearest first.
func nearest(_ query: [Float], in vectors: [[Float]], count: Int) -> [(place: Int, cosine: Float)] {
    let scores = vectors.enumerated().map { (place: $0, cosine: cosine(query, $1)) }
    return Array(scores.sorted { $0.cosine > $1.cosine }.prefix(count))
}

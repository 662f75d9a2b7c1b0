// Ten kinds of pictures that a small network can learn, for a program that must not download anything. The kinds, and
// the ranges of what is random, are those of `examples/python/cifar10.py`; the random numbers are others. See
// pictures.h.
#include <algorithm>
#include <array>
#include <cmath>

#include "apps/data/mix.h"
#include "apps/data/pictures.h"

namespace data {
namespace {

// Random numbers of one picture.
class Draws {
 public:
  Draws(std::uint64_t seed, std::int64_t picture) : state_(mix(mix(seed) + static_cast<std::uint64_t>(picture))) {}

  double uniform(double low, double high) { return low + (high - low) * (static_cast<double>(next() >> 11) * 0x1p-53); }
  std::int64_t below(std::int64_t limit) { return static_cast<std::int64_t>(next() >> 33) % limit; }
  // Mean 0, deviation 1, bell-shaped: the sum of four. No logarithm, whose last bits depend on the processor.
  double noise() {
    const std::uint64_t bits = next();
    double sum = 0;
    for (int shift = 0; shift < 64; shift += 16) sum += static_cast<double>(bits >> shift & 0xffff) / 65536 - 0.5;
    return sum * 1.7320508;
  }

 private:
  std::uint64_t next() {
    const std::uint64_t value = mix(state_);
    state_ += kMixStep;
    return value;
  }
  std::uint64_t state_;
};

// What decides where the ink of a picture is.
struct Figure {
  double row, column, size, period, phase, side;

  explicit Figure(Draws& draws)
      : row(draws.uniform(11, 20)),
        column(draws.uniform(11, 20)),
        size(draws.uniform(6, 11)),
        period(draws.uniform(4, 8)),
        phase(draws.uniform(50, 60)),
        side(draws.uniform(-1, 1) < 0 ? -1 : 1) {}

  // Where a repeated pattern is within its period, from -0.5 to 0.5.
  double within_period(double along) const {
    const double periods = (along + phase) / period;
    return periods - std::floor(periods) - 0.5;
  }

  bool ink(int label, int at_row, int at_column) const {
    const double y = at_row - row, x = at_column - column;
    const double square = x * x + y * y;
    const double farther = std::max(std::abs(x), std::abs(y)), nearer = std::min(std::abs(x), std::abs(y));
    const double in_row = within_period(at_row), in_column = within_period(at_column);
    switch (label) {
      case 0:  // disc
        return square < size * size;
      case 1:  // ring
        return square < size * size && square > 0.3025 * size * size;
      case 2:  // square
        return farther < 0.85 * size;
      case 3:  // triangle
        return y < 0.8 * size && 2 * std::abs(x) < y + size;
      case 4:  // cross
        return farther < size && nearer < 0.28 * size;
      case 5:  // rows
        return in_row < 0;
      case 6:  // columns
        return in_column < 0;
      case 7:  // diagonals
        return within_period((at_column + side * at_row) * 0.70710678) < 0;
      case 8:  // checks
        return (in_row < 0) != (in_column < 0);
      default:  // dots
        return in_row * in_row + in_column * in_column < 0.08;
    }
  }
};

// Writes the pixels; returns the label.
std::uint8_t draw(std::uint64_t seed, std::int64_t picture, std::uint8_t* pixels) {
  Draws draws(seed, picture);
  const int label = static_cast<int>(draws.below(10));
  const Figure figure(draws);
  std::array<double, 3> ink{}, paper{};
  for (double& channel : ink) channel = draws.uniform(0, 1);
  const double distance = draws.uniform(0.3, 0.7);  // at least 0.3 in each channel
  for (std::size_t c = 0; c < 3; ++c) paper[c] = ink[c] + distance - std::floor(ink[c] + distance);
  const double noise = draws.uniform(0.02, 0.12);
  constexpr int kSide = static_cast<int>(Pictures::kSide);
  for (int row = 0; row < kSide; ++row)
    for (int column = 0; column < kSide; ++column) {
      const auto& colour = figure.ink(label, row, column) ? ink : paper;
      for (int c = 0; c < 3; ++c) {
        const double value = colour[static_cast<std::size_t>(c)] + noise * draws.noise();
        pixels[(c * kSide + row) * kSide + column] = static_cast<std::uint8_t>(std::clamp(value, 0.0, 1.0) * 255);
      }
    }
  return static_cast<std::uint8_t>(label);
}

Pictures drawn(std::int64_t count, std::uint64_t seed) {
  auto bytes = std::make_shared<std::vector<std::uint8_t>>(static_cast<std::size_t>(count * Pictures::kBytes));
  Pictures pictures;
  for (std::int64_t i = 0; i < count; ++i) {
    std::uint8_t* const pixels = bytes->data() + i * Pictures::kBytes;
    pictures.labels.push_back(draw(seed, i, pixels));
    pictures.pixels.push_back(pixels);
  }
  pictures.memory.push_back(std::move(bytes));
  return pictures;
}

}  // namespace

PictureSets draw_pictures(std::int64_t training, std::int64_t test) {
  return {drawn(training, 1),
          drawn(test, 2),
          {"disc", "ring", "square", "triangle", "cross", "rows", "columns", "diagonals", "checks", "dots"}};
}

}  // namespace data

// copy: bytes between a tensor and a buffer, hashed while they are in the cache.
//
// A tensor is addressed by the byte offsets of its dense, C-order image, whatever its strides.
// Tensors are only read by gather and only written by scatter; ranges are half-open.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace statehold {

// Bytes handled at once, small enough to be still in the L2 cache when they are hashed.
inline constexpr uint64_t kCacheBytes = uint64_t{128} << 10;

// How a non-contiguous tensor lies in memory: rows of `row_bytes` contiguous bytes, and how many
// rows there are in each outer dimension, how far apart. Dimensions that can be merged are.
class Strides {
 public:
  // Shape and strides in elements. Throws std::invalid_argument when they do not fit together.
  Strides(uint64_t item_bytes, const std::vector<int64_t>& shape,
          const std::vector<int64_t>& strides);

  uint64_t bytes() const { return bytes_; }
  void gather(const std::byte* tensor, uint64_t begin, uint64_t end, std::byte* dense) const;
  void scatter(const std::byte* dense, uint64_t begin, uint64_t end, std::byte* tensor) const;

 private:
  struct Dim {
    uint64_t count;
    int64_t step_bytes;
  };
  class Cursor;

  template <class Move>
  void walk(uint64_t begin, uint64_t end, Move&& move) const;

  std::vector<Dim> dims_;  // outermost first
  uint64_t row_bytes_;
  uint64_t bytes_;
};

// Where the bytes of a tensor are.
struct Place {
  std::byte* address = nullptr;
  std::optional<Strides> strides;  // none: contiguous

  bool contiguous() const { return !strides.has_value(); }
};

// Copies [begin, end) of the tensor to `dense`; returns the XXH3-64 of the copy, not of the source,
// which might change meanwhile.
uint64_t gather_hashed(const Place& place, uint64_t begin, uint64_t end, std::byte* dense);
void scatter(const std::byte* dense, const Place& place, uint64_t begin, uint64_t end);

}  // namespace statehold

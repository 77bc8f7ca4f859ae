// copy: bytes between a tensor and a buffer, hashed while they are in the cache.
//
// A tensor is addressed by the byte offsets of its dense, C-order image, whatever its strides.
// Tensors are only read by gather and only written by scatter; ranges are half-open. A chunk of a
// tensor may be larger than what a process wants of it: then scatter places a box.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace statehold {

// Bytes handled at once, small enough to be still in the L2 cache when they are hashed.
inline constexpr uint64_t kCacheBytes = uint64_t{128} << 10;
// The same of a tensor with strides: so many that a part of a transposed one has whole cache lines
// of its memory.
inline constexpr uint64_t kStridedBytes = uint64_t{1} << 20;

// A box inside a chunk, in elements; `low` is its first index.
struct ChunkBox {
  std::vector<int64_t> chunk_shape;
  std::vector<int64_t> low;
  std::vector<int64_t> shape;
};

// How a tensor lies in memory, and which part of a dense chunk it is: rows of `row_bytes` bytes
// that are contiguous in both, and how many rows there are in each outer dimension, how far apart.
// Dimensions that can be merged are. Offsets count in the chunk's image; bytes of a chunk that are
// outside the box are passed over.
class Strides {
 public:
  // Shape and strides in elements; the box is the chunk. Throws std::invalid_argument, as the
  // other, when the arguments do not fit together.
  Strides(uint64_t item_bytes, const std::vector<int64_t>& shape,
          const std::vector<int64_t>& strides);
  Strides(uint64_t item_bytes, const ChunkBox& box, const std::vector<int64_t>& strides);

  uint64_t bytes() const { return bytes_; }  // of the chunk
  void gather(const std::byte* tensor, uint64_t begin, uint64_t end, std::byte* dense) const;
  void scatter(const std::byte* dense, uint64_t begin, uint64_t end, std::byte* tensor) const;

 private:
  struct Dim {
    uint64_t count;
    uint64_t image_step;  // bytes in the chunk
    int64_t tensor_step;  // bytes in memory
    uint64_t span;        // bytes in the chunk from the begin of an index to its end
  };
  struct Box;
  class Cursor;

  void add_dim(uint64_t count, uint64_t image_step, int64_t tensor_step);
  uint64_t rows_before(uint64_t end) const;
  template <class Move>
  void walk(uint64_t begin, uint64_t end, Move&& move) const;
  template <class MakeAxis>
  void copy_box(const Box& box, std::byte* to, const std::byte* from, MakeAxis&& axis) const;

  std::vector<Dim> dims_;  // outermost first
  uint64_t row_bytes_;
  uint64_t row_count_ = 1;
  uint64_t origin_ = 0;  // of the first row, in the chunk's image
  uint64_t bytes_;
};

// Where the bytes of a tensor are.
struct Place {
  std::byte* address = nullptr;
  std::optional<Strides> strides;  // none: contiguous
  uint64_t skip_bytes = 0;         // of the strides' image; a read may begin inside a chunk

  bool contiguous() const { return !strides.has_value(); }
};

// Copies [begin, end) of the tensor to `dense`; returns the XXH3-64 of the copy, not of the source,
// which might change meanwhile.
uint64_t gather_hashed(const Place& place, uint64_t begin, uint64_t end, std::byte* dense);
// The same to memory that is not read again soon, past the caches: half the traffic where nothing
// but the copy itself is to be hashed, which stays in a small buffer on the way.
uint64_t gather_hashed_nontemporal(const Place& place, uint64_t begin, uint64_t end,
                                   std::byte* dense);
uint64_t copy_hashed_nontemporal(const std::byte* from, uint64_t bytes, std::byte* to);
void copy_nontemporal(const std::byte* from, uint64_t bytes, std::byte* to);
void scatter(const std::byte* dense, const Place& place, uint64_t begin, uint64_t end);

}  // namespace statehold

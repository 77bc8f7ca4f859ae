// copy: contract in copy.h.
#include "copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "checksum.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace statehold {

// What walk finds: rows of `bytes` bytes, at these offsets and so far apart.
struct Strides::Rows {
  uint64_t count;
  uint64_t bytes;
  int64_t tensor;
  int64_t tensor_step;
  uint64_t dense;  // from the begin of the walk
  uint64_t dense_step;
};

// A position among the rows, advanced like an odometer.
class Strides::Cursor {
 public:
  Cursor(const Strides& strides, uint64_t row)
      : dims_(strides.dims_), at_(dims_.size()), image_(strides.origin_) {
    for (size_t d = dims_.size(); d-- > 0;) {
      move(d, row % dims_[d].count);
      row /= dims_[d].count;
    }
  }

  uint64_t image() const { return image_; }
  int64_t tensor() const { return tensor_; }
  const Dim& dim() const { return dims_.back(); }
  // Rows from here to the end of the innermost dimension.
  uint64_t run() const { return dims_.back().count - at_.back(); }

  void advance(uint64_t rows) {
    CHECK(rows <= run());
    size_t d = dims_.size() - 1;
    move(d, rows);
    while (at_[d] == dims_[d].count && d > 0) {
      image_ -= at_[d] * dims_[d].image_step;
      tensor_ -= static_cast<int64_t>(at_[d]) * dims_[d].tensor_step;
      at_[d] = 0;
      move(--d, 1);
    }
  }

 private:
  void move(size_t d, uint64_t count) {
    at_[d] += count;
    image_ += count * dims_[d].image_step;
    tensor_ += static_cast<int64_t>(count) * dims_[d].tensor_step;
  }

  const std::vector<Dim>& dims_;
  std::vector<uint64_t> at_;
  uint64_t image_;
  int64_t tensor_ = 0;
};

namespace {

// memcpy of a constant size is one or two instructions.
template <uint64_t kBytes>
void copy_rows(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step,
               uint64_t rows) {
  for (uint64_t i = 0; i < rows; ++i) {
    std::memcpy(to, from, kBytes);
    to += to_step;
    from += from_step;
  }
}

void copy_rows(std::byte* to, int64_t to_step, const std::byte* from, int64_t from_step,
               uint64_t rows, uint64_t row_bytes) {
  switch (row_bytes) {
    case 1:
      return copy_rows<1>(to, to_step, from, from_step, rows);
    case 2:
      return copy_rows<2>(to, to_step, from, from_step, rows);
    case 4:
      return copy_rows<4>(to, to_step, from, from_step, rows);
    case 8:
      return copy_rows<8>(to, to_step, from, from_step, rows);
    case 16:
      return copy_rows<16>(to, to_step, from, from_step, rows);
    default:
      for (uint64_t i = 0; i < rows; ++i) {
        std::memcpy(to, from, row_bytes);
        to += to_step;
        from += from_step;
      }
  }
}

// Every size below it can be added and multiplied by an element's without overflow.
constexpr uint64_t kImageBytesMax = uint64_t{1} << 62;

uint64_t checked_product(uint64_t bytes, uint64_t count) {
  if (count != 0 && bytes > kImageBytesMax / count) {
    throw std::invalid_argument("strided: a chunk is too large");
  }
  return bytes * count;
}

void check_dim(int64_t extent, int64_t low, int64_t count) {
  if (extent < 0 || count < 0) throw std::invalid_argument("strided: negative shape");
  if (low < 0 || low > extent || count > extent - low) {
    throw std::invalid_argument("box: it does not lie inside the chunk");
  }
}

ChunkBox whole(const std::vector<int64_t>& shape) {
  return {shape, std::vector<int64_t>(shape.size(), 0), shape};
}

}  // namespace

Strides::Strides(uint64_t item_bytes, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& strides)
    : Strides(item_bytes, whole(shape), strides) {}

Strides::Strides(uint64_t item_bytes, const ChunkBox& box, const std::vector<int64_t>& strides)
    : row_bytes_(item_bytes), bytes_(item_bytes) {
  const size_t rank = box.chunk_shape.size();
  if (item_bytes == 0 || box.low.size() != rank || box.shape.size() != rank ||
      strides.size() != rank) {
    throw std::invalid_argument("strided: item size, shape and strides do not fit together");
  }
  for (size_t d = rank; d-- > 0;) {
    check_dim(box.chunk_shape[d], box.low[d], box.shape[d]);
    origin_ += static_cast<uint64_t>(box.low[d]) * bytes_;
    add_dim(static_cast<uint64_t>(box.shape[d]), bytes_,
            strides[d] * static_cast<int64_t>(item_bytes));
    bytes_ = checked_product(bytes_, static_cast<uint64_t>(box.chunk_shape[d]));
  }
  if (dims_.empty()) dims_.push_back({1, row_bytes_, 0});
  for (const Dim& dim : dims_) row_count_ *= dim.count;
  if (row_bytes_ == 0) row_count_ = 0;
}

// The next one outwards.
void Strides::add_dim(uint64_t count, uint64_t image_step, int64_t tensor_step) {
  if (count == 1) return;
  const auto follows = [&](uint64_t image_bytes, int64_t tensor_bytes) {
    return image_step == image_bytes && tensor_step == tensor_bytes;
  };
  if (dims_.empty() && follows(row_bytes_, static_cast<int64_t>(row_bytes_))) {
    row_bytes_ *= count;
    return;
  }
  if (!dims_.empty()) {
    Dim& inner = dims_.front();
    const auto inner_count = static_cast<int64_t>(inner.count);
    if (follows(inner.image_step * inner.count, inner.tensor_step * inner_count)) {
      inner.count *= count;
      return;
    }
  }
  dims_.insert(dims_.begin(), Dim{count, image_step, tensor_step});
}

// Rows are ordered in the image, and all rows of one index of a dimension end before the next
// index begins: its quotient counts them.
uint64_t Strides::rows_before(uint64_t end) const {
  if (end < origin_ || row_count_ == 0) return 0;
  uint64_t left = end - origin_;
  uint64_t rows = 0;
  uint64_t rows_inside = row_count_;  // of one index of the dimension before
  for (const Dim& dim : dims_) {
    if (left >= dim.count * dim.image_step) return rows + rows_inside;
    rows_inside /= dim.count;
    rows += left / dim.image_step * rows_inside;
    left %= dim.image_step;
  }
  return rows + (left >= row_bytes_ ? 1 : 0);
}

// Calls move(Rows) for the parts of [begin, end): a torn row at either end, and runs of whole rows
// between.
template <class Move>
void Strides::walk(uint64_t begin, uint64_t end, Move&& move) const {
  CHECK(begin <= end);
  CHECK(end <= bytes_);
  uint64_t row = rows_before(begin);
  if (row == row_count_) return;
  for (Cursor cursor(*this, row); row < row_count_ && cursor.image() < end;) {
    const uint64_t at = std::max(cursor.image(), begin);
    const uint64_t bytes = std::min(cursor.image() + row_bytes_, end) - at;
    const uint64_t skip = at - cursor.image();
    const Dim& dim = cursor.dim();
    Rows rows{.count = 1,
              .bytes = bytes,
              .tensor = cursor.tensor() + static_cast<int64_t>(skip),
              .tensor_step = dim.tensor_step,
              .dense = at - begin,
              .dense_step = dim.image_step};
    if (bytes == row_bytes_) {
      rows.count = std::min((end - at - bytes) / dim.image_step + 1, cursor.run());
    }
    move(rows);
    row += rows.count;
    cursor.advance(rows.count);
  }
}

void Strides::gather(const std::byte* tensor, uint64_t begin, uint64_t end,
                     std::byte* dense) const {
  walk(begin, end, [&](const Rows& rows) {
    copy_rows(dense + rows.dense, static_cast<int64_t>(rows.dense_step), tensor + rows.tensor,
              rows.tensor_step, rows.count, rows.bytes);
  });
}

void Strides::scatter(const std::byte* dense, uint64_t begin, uint64_t end,
                      std::byte* tensor) const {
  walk(begin, end, [&](const Rows& rows) {
    copy_rows(tensor + rows.tensor, rows.tensor_step, dense + rows.dense,
              static_cast<int64_t>(rows.dense_step), rows.count, rows.bytes);
  });
}

uint64_t gather_hashed(const Place& place, uint64_t begin, uint64_t end, std::byte* dense) {
  Xxh3 hash;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bytes = std::min(kCacheBytes, end - at);
    std::byte* to = dense + (at - begin);
    if (place.strides) {
      place.strides->gather(place.address, at, at + bytes, to);
    } else {
      std::memcpy(to, place.address + at, bytes);
    }
    if (end - begin <= kCacheBytes) return xxh3_64(to, bytes);
    hash.update(to, bytes);
    at += bytes;
  }
  return hash.digest();
}

namespace {

constexpr uint64_t kLineBytes = 64;
// What is on the way at once: it stays in the L1 cache, and streams of loads and stores this short
// keep each other busy.
constexpr uint64_t kStreamBytes = 4096;

#ifdef __SSE2__

// Whole lines to a line's begin. Fetches `next` meanwhile: the processor does not foresee it.
void store_lines(const std::byte* from, uint64_t bytes, std::byte* to, const std::byte* next) {
  for (uint64_t at = 0; at < bytes; at += kLineBytes) {
    _mm_prefetch(reinterpret_cast<const char*>(next + at), _MM_HINT_T0);
    const auto* line = reinterpret_cast<const __m128i*>(from + at);
    auto* target = reinterpret_cast<__m128i*>(to + at);
    const __m128i a = _mm_loadu_si128(line);
    const __m128i b = _mm_loadu_si128(line + 1);
    const __m128i c = _mm_loadu_si128(line + 2);
    const __m128i d = _mm_loadu_si128(line + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  }
}

// Such stores are not ordered by locks.
void finish_stores() { _mm_sfence(); }

#else

void store_lines(const std::byte* from, uint64_t bytes, std::byte* to, const std::byte*) {
  std::memcpy(to, from, bytes);
}

void finish_stores() {}

#endif

// Calls part(from, bytes, to) for the ends that are not whole lines, and lines(from, bytes, to,
// next) for what is between, in parts of kStreamBytes.
template <class Part, class Lines>
void walk_lines(const std::byte* from, uint64_t bytes, std::byte* to, Part&& part, Lines&& lines) {
  const uint64_t skew = reinterpret_cast<uintptr_t>(to) % kLineBytes;
  uint64_t at = std::min(bytes, (kLineBytes - skew) % kLineBytes);
  if (at > 0) part(from, at, to);
  const uint64_t end = at + (bytes - at) / kLineBytes * kLineBytes;
  while (at < end) {
    const uint64_t count = std::min(kStreamBytes, end - at);
    const std::byte* here = from + at;
    lines(here, count, to + at, at + 2 * kStreamBytes <= bytes ? here + count : here);
    at += count;
  }
  if (at < bytes) part(from + at, bytes - at, to + at);
}

}  // namespace

void copy_nontemporal(const std::byte* from, uint64_t bytes, std::byte* to) {
  walk_lines(
      from, bytes, to, [](const auto* f, auto n, auto* t) { std::memcpy(t, f, n); }, store_lines);
  finish_stores();
}

uint64_t gather_hashed_nontemporal(const Place& place, uint64_t begin, uint64_t end,
                                   std::byte* dense) {
  if (!place.contiguous()) return gather_hashed(place, begin, end, dense);
  return copy_hashed_nontemporal(place.address + begin, end - begin, dense);
}

uint64_t copy_hashed_nontemporal(const std::byte* from, uint64_t bytes, std::byte* to) {
  if (bytes < 2 * kStreamBytes) {
    std::memcpy(to, from, bytes);
    return xxh3_64(to, bytes);
  }
  alignas(kLineBytes) std::byte copy[kStreamBytes];
  Xxh3 hash;
  const auto take = [&](const std::byte* source, uint64_t count) {
    std::memcpy(copy, source, count);
    hash.update(copy, count);
  };
  walk_lines(
      from, bytes, to,
      [&](const std::byte* source, uint64_t count, std::byte* target) {
        take(source, count);
        std::memcpy(target, copy, count);
      },
      [&](const std::byte* source, uint64_t count, std::byte* target, const std::byte* next) {
        take(source, count);
        store_lines(copy, count, target, next);
      });
  finish_stores();
  return hash.digest();
}

void scatter(const std::byte* dense, const Place& place, uint64_t begin, uint64_t end) {
  if (place.strides) {
    const uint64_t skip = place.skip_bytes;
    place.strides->scatter(dense, skip + begin, skip + end, place.address);
  } else {
    std::memcpy(place.address + begin, dense, end - begin);
  }
}

}  // namespace statehold

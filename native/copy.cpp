// copy: contract in copy.h.
#include "copy.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <span>
#include <stdexcept>

#include "check.h"
#include "checksum.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace statehold {

// What walk finds: `count` indices of a dimension, with all rows inside. Or a part of one row:
// `dim` is the innermost, and `bytes` less than a row.
struct Strides::Box {
  size_t dim;
  uint64_t count;
  uint64_t bytes;  // of a row
  int64_t tensor;
  uint64_t dense;  // from the begin of the walk
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

  bool ended() const { return at_.front() == dims_.front().count; }
  uint64_t image() const { return image_; }
  int64_t tensor() const { return tensor_; }

  // The outermost dimension that has a whole index here, before `end`.
  size_t widest(uint64_t end) const {
    size_t d = dims_.size() - 1;
    while (d > 0 && at_[d] == 0 && end - image_ >= dims_[d - 1].span) --d;
    return d;
  }

  // Whole indices of the dimension from here to its end, or to `end`.
  uint64_t run(size_t d, uint64_t end) const {
    const uint64_t before_end = (end - image_ - dims_[d].span) / dims_[d].image_step + 1;
    return std::min(before_end, dims_[d].count - at_[d]);
  }

  void advance(size_t d, uint64_t count) {
    CHECK(count <= dims_[d].count - at_[d]);
    move(d, count);
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
  const auto dense = static_cast<int64_t>(row_bytes);
  if (to_step == dense && from_step == dense) {
    std::memcpy(to, from, rows * row_bytes);
    return;
  }
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

// One dimension of what is copied.
struct Axis {
  uint64_t count;
  int64_t to_step;
  int64_t from_step;
};

// Rows up to this are copied in tiles where their order differs on the two sides. A tile is 64 or
// 32 rows wide, so that it takes whole cache lines on both sides, and fits into the L1 cache.
constexpr uint64_t kTileRowBytes = 16;
constexpr uint64_t kTileBytes = uint64_t{18} << 10;

constexpr uint64_t tile_side(uint64_t row_bytes) { return row_bytes <= 4 ? 64 : 32; }
// The rows of a tile are not a power of two apart: those would share the same few lines of a cache.
constexpr uint64_t tile_pitch(uint64_t row_bytes) { return tile_side(row_bytes) * row_bytes + 16; }
static_assert(tile_side(4) * tile_pitch(4) <= kTileBytes);
static_assert(tile_side(kTileRowBytes) * tile_pitch(kTileRowBytes) <= kTileBytes);

// `far` lies close together in `from`, and `near` in `to`: a tile is read in the order of the one,
// and written in the order of the other.
void copy_tile(const Axis& far, const Axis& near, std::byte* to, const std::byte* from,
               uint64_t row_bytes) {
  alignas(64) std::byte tile[kTileBytes];
  const auto pitch = static_cast<int64_t>(tile_pitch(row_bytes));
  const auto item = static_cast<int64_t>(row_bytes);
  for (uint64_t i = 0; i < near.count; ++i) {
    const auto at = static_cast<int64_t>(i);
    copy_rows(tile + at * item, pitch, from + at * near.from_step, far.from_step, far.count,
              row_bytes);
  }
  for (uint64_t i = 0; i < far.count; ++i) {
    const auto at = static_cast<int64_t>(i);
    copy_rows(to + at * far.to_step, near.to_step, tile + at * pitch, item, near.count, row_bytes);
  }
}

void copy_tiles(const Axis& far, const Axis& near, std::byte* to, const std::byte* from,
                uint64_t row_bytes) {
  const uint64_t side = tile_side(row_bytes);
  Axis n = near;
  Axis f = far;
  for (uint64_t i = 0; i < near.count; i += side) {
    n.count = std::min(side, near.count - i);
    for (uint64_t k = 0; k < far.count; k += side) {
      f.count = std::min(side, far.count - k);
      const auto in = static_cast<int64_t>(i);
      const auto at = static_cast<int64_t>(k);
      copy_tile(f, n, to + in * near.to_step + at * far.to_step,
                from + in * near.from_step + at * far.from_step, row_bytes);
    }
  }
}

// The last two of `axes` in tiles, or the last one row after row.
void copy_axes(std::span<const Axis> axes, bool in_tiles, std::byte* to, const std::byte* from,
               uint64_t row_bytes) {
  const Axis& axis = axes.front();
  if (axes.size() == 1) {
    return copy_rows(to, axis.to_step, from, axis.from_step, axis.count, row_bytes);
  }
  if (axes.size() == 2 && in_tiles) return copy_tiles(axis, axes.back(), to, from, row_bytes);
  for (uint64_t i = 0; i < axis.count; ++i) {
    copy_axes(axes.subspan(1), in_tiles, to, from, row_bytes);
    to += axis.to_step;
    from += axis.from_step;
  }
}

// Puts the axis last that `to` has close together; before it the one that `from` has. Returns
// whether these are two.
bool order_for_tiles(std::vector<Axis>& axes) {
  const auto nearer = [](auto step) {
    return [step](const Axis& a, const Axis& b) { return std::abs(a.*step) < std::abs(b.*step); };
  };
  const auto far = std::ranges::min_element(axes, nearer(&Axis::from_step));
  std::rotate(far, far + 1, axes.end());
  const auto near = std::ranges::min_element(axes, nearer(&Axis::to_step));
  const bool are_two = near != axes.end() - 1;
  std::rotate(near, near + 1, axes.end());
  return are_two;
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
  if (dims_.empty()) dims_.push_back({1, row_bytes_, 0, row_bytes_});
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
  uint64_t span = row_bytes_;
  if (!dims_.empty()) {
    Dim& inner = dims_.front();
    const auto inner_count = static_cast<int64_t>(inner.count);
    if (follows(inner.image_step * inner.count, inner.tensor_step * inner_count)) {
      inner.count *= count;
      return;
    }
    span = inner.span + (inner.count - 1) * inner.image_step;
  }
  dims_.insert(dims_.begin(), Dim{count, image_step, tensor_step, span});
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

// Calls move(Box) for the parts of [begin, end): a torn row at either end, and between them boxes
// as large as the range has them.
template <class Move>
void Strides::walk(uint64_t begin, uint64_t end, Move&& move) const {
  CHECK(begin <= end);
  CHECK(end <= bytes_);
  const uint64_t row = rows_before(begin);
  if (row == row_count_) return;
  for (Cursor cursor(*this, row); !cursor.ended() && cursor.image() < end;) {
    const uint64_t at = std::max(cursor.image(), begin);
    const uint64_t skip = at - cursor.image();
    Box box{.dim = dims_.size() - 1,
            .count = 1,
            .bytes = std::min(cursor.image() + row_bytes_, end) - at,
            .tensor = cursor.tensor() + static_cast<int64_t>(skip),
            .dense = at - begin};
    if (box.bytes == row_bytes_) {
      box.dim = cursor.widest(end);
      box.count = cursor.run(box.dim, end);
    }
    move(box);
    cursor.advance(box.dim, box.count);
  }
}

// axis: of a dimension.
template <class MakeAxis>
void Strides::copy_box(const Box& box, std::byte* to, const std::byte* from,
                       MakeAxis&& axis) const {
  std::vector<Axis> axes;
  for (size_t d = box.dim; d < dims_.size(); ++d) {
    Dim dim = dims_[d];
    if (d == box.dim) dim.count = box.count;
    if (dim.count > 1 || (axes.empty() && d + 1 == dims_.size())) axes.push_back(axis(dim));
  }
  const bool in_tiles = box.bytes <= kTileRowBytes && order_for_tiles(axes);
  copy_axes(axes, in_tiles, to, from, box.bytes);
}

void Strides::gather(const std::byte* tensor, uint64_t begin, uint64_t end,
                     std::byte* dense) const {
  walk(begin, end, [&](const Box& box) {
    copy_box(box, dense + box.dense, tensor + box.tensor, [](const Dim& dim) {
      return Axis{dim.count, static_cast<int64_t>(dim.image_step), dim.tensor_step};
    });
  });
}

void Strides::scatter(const std::byte* dense, uint64_t begin, uint64_t end,
                      std::byte* tensor) const {
  walk(begin, end, [&](const Box& box) {
    copy_box(box, tensor + box.tensor, dense + box.dense, [](const Dim& dim) {
      return Axis{dim.count, dim.tensor_step, static_cast<int64_t>(dim.image_step)};
    });
  });
}

uint64_t gather_hashed(const Place& place, uint64_t begin, uint64_t end, std::byte* dense) {
  Xxh3 hash;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bytes = std::min(place.strides ? kStridedBytes : kCacheBytes, end - at);
    std::byte* to = dense + (at - begin);
    if (place.strides) {
      place.strides->gather(place.address, at, at + bytes, to);
    } else {
      std::memcpy(to, place.address + at, bytes);
    }
    if (bytes == end - begin) return xxh3_64(to, bytes);
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

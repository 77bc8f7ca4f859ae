// copy: contract in copy.h.
#include "copy.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "check.h"
#include "checksum.h"

namespace statehold {

// A position among the rows, advanced like an odometer.
class Strides::Cursor {
 public:
  Cursor(const std::vector<Dim>& dims, uint64_t row) : dims_(dims), at_(dims.size()) {
    for (size_t d = dims.size(); d-- > 0;) {
      at_[d] = row % dims[d].count;
      row /= dims[d].count;
      offset_ += static_cast<int64_t>(at_[d]) * dims[d].step_bytes;
    }
  }

  int64_t offset() const { return offset_; }
  // Rows from here to the end of the innermost dimension.
  uint64_t run() const { return dims_.back().count - at_.back(); }
  int64_t step() const { return dims_.back().step_bytes; }

  void advance(uint64_t rows) {
    CHECK(rows <= run());
    size_t d = dims_.size() - 1;
    at_[d] += rows;
    offset_ += static_cast<int64_t>(rows) * dims_[d].step_bytes;
    while (at_[d] == dims_[d].count && d > 0) {
      offset_ -= static_cast<int64_t>(at_[d]) * dims_[d].step_bytes;
      at_[d] = 0;
      --d;
      ++at_[d];
      offset_ += dims_[d].step_bytes;
    }
  }

 private:
  const std::vector<Dim>& dims_;
  std::vector<uint64_t> at_;
  int64_t offset_ = 0;
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

}  // namespace

Strides::Strides(uint64_t item_bytes, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& strides)
    : row_bytes_(item_bytes), bytes_(item_bytes) {
  if (item_bytes == 0 || shape.size() != strides.size()) {
    throw std::invalid_argument("strided: item size, shape and strides do not fit together");
  }
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] < 0) throw std::invalid_argument("strided: negative shape");
    const auto count = static_cast<uint64_t>(shape[d]);
    const int64_t step_bytes = strides[d] * static_cast<int64_t>(item_bytes);
    bytes_ *= count;
    if (count == 1) continue;
    if (dims_.empty() && step_bytes == static_cast<int64_t>(row_bytes_)) {
      row_bytes_ *= count;
    } else if (!dims_.empty() &&
               step_bytes == dims_.front().step_bytes * static_cast<int64_t>(dims_.front().count)) {
      dims_.front().count *= count;
    } else {
      dims_.insert(dims_.begin(), Dim{count, step_bytes});
    }
  }
  if (dims_.empty()) dims_.push_back({1, 0});
}

// Calls move(tensor offset, step, dense offset, rows, row bytes) for the parts of [begin, end):
// a torn row at either end, and runs of whole rows between.
template <class Move>
void Strides::walk(uint64_t begin, uint64_t end, Move&& move) const {
  CHECK(begin <= end);
  CHECK(end <= bytes_);
  if (begin == end) return;
  Cursor cursor(dims_, begin / row_bytes_);
  for (uint64_t at = begin; at < end;) {
    const uint64_t skip = at % row_bytes_;
    const uint64_t whole = skip == 0 ? std::min((end - at) / row_bytes_, cursor.run()) : 0;
    if (whole > 0) {
      move(cursor.offset(), cursor.step(), at - begin, whole, row_bytes_);
      at += whole * row_bytes_;
      cursor.advance(whole);
      continue;
    }
    const uint64_t part = std::min(row_bytes_ - skip, end - at);
    move(cursor.offset() + static_cast<int64_t>(skip), 0, at - begin, 1, part);
    at += part;
    if (at % row_bytes_ == 0) cursor.advance(1);
  }
}

void Strides::gather(const std::byte* tensor, uint64_t begin, uint64_t end,
                     std::byte* dense) const {
  walk(begin, end, [&](int64_t from, int64_t step, uint64_t to, uint64_t rows, uint64_t bytes) {
    copy_rows(dense + to, static_cast<int64_t>(bytes), tensor + from, step, rows, bytes);
  });
}

void Strides::scatter(const std::byte* dense, uint64_t begin, uint64_t end,
                      std::byte* tensor) const {
  walk(begin, end, [&](int64_t to, int64_t step, uint64_t from, uint64_t rows, uint64_t bytes) {
    copy_rows(tensor + to, step, dense + from, static_cast<int64_t>(bytes), rows, bytes);
  });
}

uint64_t gather_hashed(const Place& place, uint64_t begin, uint64_t end, std::byte* dense) {
  Xxh3 hash;
  for (uint64_t at = begin; at < end;) {
    const uint64_t bytes = std::min(kCacheBytes, end - at);
    std::byte* to = dense + (at - begin);
    if (place.contiguous()) {
      std::memcpy(to, place.address + at, bytes);
    } else {
      place.strides->gather(place.address, at, at + bytes, to);
    }
    if (end - begin <= kCacheBytes) return xxh3_64(to, bytes);
    hash.update(to, bytes);
    at += bytes;
  }
  return hash.digest();
}

void scatter(const std::byte* dense, const Place& place, uint64_t begin, uint64_t end) {
  if (place.contiguous()) {
    std::memcpy(place.address + begin, dense, end - begin);
  } else {
    place.strides->scatter(dense, begin, end, place.address);
  }
}

}  // namespace statehold

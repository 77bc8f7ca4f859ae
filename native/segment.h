// segment: how a file is cut. A segment is a contiguous range of a file that belongs to one tensor
// (or to the header). A grid of `block_bytes` lies over the file; a piece is a segment's part of
// one grid cell, and has one checksum. Buffers hold whole grid cells, so a piece never straddles
// two.
#pragma once

#include <algorithm>
#include <cstdint>

#include "copy.h"

namespace statehold {

// What Python says of a segment, in one byte. The module exports these, so nobody writes them out.
enum SegmentFlag : uint8_t {
  kSegmentEager = 1,     // copied before those that are not
  kSegmentExternal = 2,  // Python moves its bytes, through the buffer
  kSegmentShared = 4,    // other processes read it, too: through the page cache
};

struct Segment {
  uint32_t file = 0;
  uint64_t begin = 0;  // file offsets
  uint64_t end = 0;
  Place place;
  bool eager = false;  // these three: SegmentFlag
  bool external = false;
  bool shared = false;
  uint64_t first_sum = 0;  // index of its first piece's checksum

  bool empty() const { return begin == end; }
};

// One segment's bytes in a buffer, as Python sees them.
struct BufferPiece {
  uint64_t segment = 0;
  uint64_t segment_offset = 0;
  uint64_t buffer_offset = 0;
  uint64_t bytes = 0;
};

inline uint64_t piece_count(const Segment& segment, uint64_t block_bytes) {
  if (segment.empty()) return 0;
  return (segment.end - 1) / block_bytes - segment.begin / block_bytes + 1;
}

// Calls body(index of the checksum, begin, end) for the pieces of the segment inside
// [begin, end), whose ends must not cut a piece.
template <class Body>
void for_each_piece(const Segment& segment, uint64_t begin, uint64_t end, uint64_t block_bytes,
                    Body&& body) {
  uint64_t at = std::max(begin, segment.begin);
  const uint64_t stop = std::min(end, segment.end);
  while (at < stop) {
    const uint64_t cell = at / block_bytes;
    const uint64_t piece_end = std::min(stop, (cell + 1) * block_bytes);
    body(segment.first_sum + cell - segment.begin / block_bytes, at, piece_end);
    at = piece_end;
  }
}

}  // namespace statehold

// A state to save and restore: some arrays, the requests that move them, and what has to come out.
// Arrays are copied by the engine, some before others (eager) or back to front (reversed), or by
// the caller (external).
#pragma once

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "checksum.h"
#include "engine.h"
#include "test.h"

namespace statehold::test {

struct State {
  std::string header;
  std::vector<std::vector<std::byte>> arrays;
  std::vector<bool> external;
  std::vector<bool> eager;
  std::vector<bool> reversed;

  State(uint64_t seed, bool with_external, uint64_t array_bytes_max = 150'000) {
    std::mt19937_64 random(seed);
    header.assign(kPageBytes, static_cast<char>(seed));
    for (uint64_t i = 0, count = random() % 8; i < count; ++i) {
      arrays.emplace_back(random() % array_bytes_max);
      for (std::byte& b : arrays.back()) b = static_cast<std::byte>(random());
      external.push_back(with_external && random() % 2 == 0);
      eager.push_back(i % 3 == 0);
      reversed.push_back(!external.back() && !arrays.back().empty() && random() % 4 == 0);
    }
  }

  // Instead of what it has.
  void set_arrays(std::vector<std::vector<std::byte>> given, bool all_external = false) {
    arrays = std::move(given);
    external.assign(arrays.size(), all_external);
    eager.assign(arrays.size(), false);
    reversed.assign(arrays.size(), false);
  }

  uint64_t bytes() const {
    uint64_t sum = header.size();
    for (const auto& array : arrays) sum += array.size();
    return sum;
  }

  std::vector<Segment> segments(uint64_t begin) {
    std::vector<Segment> made;
    for (size_t i = 0; i < arrays.size(); ++i) {
      Segment segment;
      segment.begin = begin;
      segment.end = begin += arrays[i].size();
      segment.place.address = arrays[i].data();
      segment.external = external[i];
      segment.eager = eager[i];
      if (reversed[i]) {
        const auto size = static_cast<int64_t>(arrays[i].size());
        segment.place.address += size - 1;
        segment.place.strides.emplace(1, std::vector<int64_t>{size}, std::vector<int64_t>{-1});
      }
      made.push_back(std::move(segment));
    }
    return made;
  }

  WriteRequest write_request(uint64_t block_bytes) {
    return {bytes(), block_bytes, header, segments(header.size())};
  }

  // Of a file whose checksums are `sums`; the header is verified, not wanted.
  ReadRequest read_request(const std::string& path, const std::vector<uint64_t>& sums,
                           uint64_t block_bytes) {
    ReadRequest request{{path}, {bytes()}, block_bytes, segments(header.size()), sums};
    Segment head;
    head.end = header.size();
    request.segments.insert(request.segments.begin(), std::move(head));
    return request;
  }

  std::string image() const {
    std::string data = header;
    for (size_t i = 0; i < arrays.size(); ++i) {
      std::string array(reinterpret_cast<const char*>(arrays[i].data()), arrays[i].size());
      if (reversed[i]) std::ranges::reverse(array);
      data += array;
    }
    return data;
  }

  std::vector<uint64_t> checksums(uint64_t block_bytes) {
    const std::string data = image();
    std::vector<Segment> all = segments(header.size());
    Segment head;
    head.end = header.size();
    all.insert(all.begin(), std::move(head));
    std::vector<uint64_t> sums;
    for (const Segment& each : all) {
      for_each_piece(each, each.begin, each.end, block_bytes,
                     [&](uint64_t, uint64_t begin, uint64_t end) {
                       const auto* bytes = reinterpret_cast<const std::byte*>(data.data());
                       sums.push_back(xxh3_64(bytes + begin, end - begin));
                     });
    }
    return sums;
  }
};

inline std::byte* buffer_of(Engine& engine, const Lease& lease) {
  return engine.memory()->buffer(lease.index);
}

inline void fill_one(Engine& engine, const Fill& fill, State& state) {
  for (const BufferPiece& piece : fill.pieces) {
    std::memcpy(buffer_of(engine, fill.lease) + piece.buffer_offset,
                state.arrays[piece.segment - 1].data() + piece.segment_offset, piece.bytes);
  }
}

inline void empty_one(Engine& engine, const Ready& ready, State& state) {
  for (const BufferPiece& piece : ready.pieces) {
    std::memcpy(state.arrays[piece.segment - 1].data() + piece.segment_offset,
                buffer_of(engine, ready.lease) + piece.buffer_offset, piece.bytes);
  }
}

inline void fill_all(Engine& engine, WriteJob& job, State& state) {
  while (std::optional<Fill> fill = job.next_fill(std::nullopt)) {
    fill_one(engine, *fill, state);
    job.filled(*fill);
  }
}

inline void empty_all(Engine& engine, ReadJob& job, State& state) {
  while (std::optional<Ready> ready = job.next_ready(std::nullopt)) {
    empty_one(engine, *ready, state);
    job.release(*ready);
  }
}

}  // namespace statehold::test

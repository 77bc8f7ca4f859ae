// raw: what the device gives through an Fs with no copy and no checksum; the denominator of
// benchmarks. Seconds include opening and allocating the file, and making it durable.
#pragma once

#include <cstdint>
#include <string>

#include "fs.h"

namespace statehold {

struct RawOptions {
  uint64_t buffer_bytes = uint64_t{16} << 20;
  int depth = 32;
};

double raw_write_seconds(Fs& fs, const std::string& path, uint64_t file_bytes, bool reuse,
                         const RawOptions& options);
double raw_read_seconds(Fs& fs, const std::string& path, const RawOptions& options);

}  // namespace statehold

// XXH3-64 with known values, and in parts as a whole.
#include "checksum.h"

#include <string_view>
#include <vector>

#include "test.h"

using namespace statehold;

TEST(known_values) {  // of the reference implementation
  EXPECT(xxh3_64(nullptr, 0) == 0x2D06800538D394C2u);
  const std::string_view text = "a";
  EXPECT(xxh3_64(reinterpret_cast<const std::byte*>(text.data()), 1) == 0xE6C632B61E964E1Fu);
}

TEST(parts_are_the_whole) {
  std::vector<std::byte> data(3'000'001);
  uint64_t state = 1;
  for (std::byte& b : data)
    b = static_cast<std::byte>((state = state * 6364136223846793005u + 1) >> 56);
  for (const uint64_t bytes : {1u, 240u, 241u, 131'072u, 131'073u, 3'000'001u}) {
    for (const uint64_t part : {1'000u, 131'072u}) {
      Xxh3 hash;
      for (uint64_t at = 0; at < bytes; at += part) {
        hash.update(data.data() + at, std::min<uint64_t>(part, bytes - at));
      }
      EXPECT(hash.digest() == xxh3_64(data.data(), bytes));
    }
  }
}

TEST_MAIN

// gather and scatter against an index by index reference, for every range and many layouts.
#include "copy.h"

#include <cstring>
#include <stdexcept>

#include "checksum.h"
#include "test.h"

using namespace statehold;

namespace {

struct Layout {
  uint64_t item_bytes;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
};

const std::vector<Layout> kLayouts = {
    {2, {4, 6}, {1, 4}},                // transposed
    {4, {3, 5}, {8, 1}},                // rows of a wider matrix
    {8, {5, 3, 2}, {12, 4, 2}},         // every second column
    {1, {2, 3, 4}, {12, 4, 1}},         // contiguous after all
    {16, {3, 1, 2}, {4, 99, 2}},        // a dimension of one
    {3, {4, 4}, {1, 4}},                // an odd element size
    {4, {}, {}},                        // a scalar
    {2, {3, 4}, {0, 1}},                // expanded
    {4, {2, 3, 2, 2}, {24, 1, 12, 6}},  // permuted
};

// The dense image, one element at a time.
std::vector<std::byte> dense_image(const Layout& layout, const std::byte* tensor) {
  std::vector<std::byte> image;
  std::vector<int64_t> index(layout.shape.size(), 0);
  while (true) {
    int64_t at = 0;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * layout.strides[d];
    const std::byte* item = tensor + at * static_cast<int64_t>(layout.item_bytes);
    image.insert(image.end(), item, item + layout.item_bytes);
    size_t d = index.size();
    while (d > 0 && ++index[d - 1] == layout.shape[d - 1]) index[--d] = 0;
    if (d == 0) return image;
  }
}

std::vector<std::byte> numbered(size_t bytes) {
  std::vector<std::byte> memory(bytes);
  for (size_t i = 0; i < bytes; ++i) memory[i] = static_cast<std::byte>(i * 7 + i / 256);
  return memory;
}

}  // namespace

TEST(gather_any_range) {
  for (const Layout& layout : kLayouts) {
    std::vector<std::byte> memory = numbered(4096);
    const std::vector<std::byte> image = dense_image(layout, memory.data());
    const Place place{memory.data(), Strides(layout.item_bytes, layout.shape, layout.strides)};
    EXPECT(place.strides->bytes() == image.size());
    for (uint64_t begin = 0; begin < image.size(); ++begin) {
      for (uint64_t end = begin + 1; end <= image.size(); ++end) {
        std::vector<std::byte> out(end - begin);
        const uint64_t sum = gather_hashed(place, begin, end, out.data());
        EXPECT(std::memcmp(out.data(), image.data() + begin, out.size()) == 0);
        EXPECT(sum == xxh3_64(out.data(), out.size()));
      }
    }
  }
}

TEST(scatter_in_parts_restores) {
  for (const Layout& layout : kLayouts) {
    std::vector<std::byte> memory = numbered(4096);
    const std::vector<std::byte> image = dense_image(layout, memory.data());
    for (const uint64_t part : {1u, 3u, 7u, 4096u}) {
      std::vector<std::byte> other(4096);
      const Place place{other.data(), Strides(layout.item_bytes, layout.shape, layout.strides)};
      for (uint64_t at = 0; at < image.size(); at += part) {
        const uint64_t end = std::min<uint64_t>(at + part, image.size());
        scatter(image.data() + at, place, at, end);
      }
      EXPECT(dense_image(layout, other.data()) == image);
    }
  }
}

TEST(large_contiguous_ranges) {
  std::vector<std::byte> memory = numbered(3 * kCacheBytes + 5);
  std::vector<std::byte> out(memory.size() - 1);
  const Place place{memory.data(), std::nullopt};
  const uint64_t sum = gather_hashed(place, 1, memory.size(), out.data());
  EXPECT(std::memcmp(out.data(), memory.data() + 1, out.size()) == 0);
  EXPECT(sum == xxh3_64(out.data(), out.size()));
}

TEST(empty_and_impossible) {
  EXPECT(Strides(4, {3, 0}, {1, 1}).bytes() == 0);
  EXPECT_THROWS(std::invalid_argument, Strides(4, {3}, {1, 1}));
  EXPECT_THROWS(std::invalid_argument, Strides(0, {3}, {1}));
  EXPECT_THROWS(std::invalid_argument, Strides(4, {-1}, {1}));
}

TEST_MAIN

// gather and scatter against an index by index reference, for every range and many layouts.
#include "copy.h"

#include <algorithm>
#include <cstring>
#include <random>
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

// A chunk, a box in it, and where its elements go: dimensions permuted and widened.
struct BoxCase {
  uint64_t item_bytes;
  ChunkBox box;
  std::vector<int64_t> strides;
  uint64_t chunk_bytes;
  uint64_t memory_bytes;

  explicit BoxCase(std::mt19937_64& random) {
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % uint64_t(n)); };
    item_bytes = std::vector<uint64_t>{1, 2, 3, 4, 8, 16}[random() % 6];
    chunk_bytes = memory_bytes = item_bytes;
    for (int64_t d = below(5); d > 0; --d) {
      const int64_t extent = 1 + below(6);
      const int64_t low = random() % 2 == 0 ? 0 : below(extent);
      const int64_t count = random() % 2 == 0 ? extent - low : below(extent - low + 1);
      box.chunk_shape.push_back(extent);
      box.low.push_back(low);
      box.shape.push_back(count);
      chunk_bytes *= static_cast<uint64_t>(extent);
    }
    std::vector<size_t> order(box.shape.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = order.size() - 1 - d;
    if (random() % 2 == 0) std::shuffle(order.begin(), order.end(), random);
    strides.resize(order.size());
    for (const size_t d : order) {
      strides[d] = static_cast<int64_t>(memory_bytes / item_bytes);
      memory_bytes *= static_cast<uint64_t>(std::max<int64_t>(box.shape[d], 1));
      if (random() % 3 == 0) memory_bytes *= 2;
    }
  }

  // Element by element; `image` is the chunk's.
  void place(const std::byte* image, std::byte* memory) const {
    std::vector<int64_t> index(box.shape.size(), 0);
    for (uint64_t item = 0; item < chunk_bytes / item_bytes; ++item) {
      bool inside = true;
      int64_t to = 0;
      for (size_t d = 0; d < index.size(); ++d) {
        const int64_t at = index[d] - box.low[d];
        inside = inside && at >= 0 && at < box.shape[d];
        to += at * strides[d] * static_cast<int64_t>(item_bytes);
      }
      if (inside) std::memcpy(memory + to, image + item * item_bytes, item_bytes);
      for (size_t d = index.size(); d > 0 && ++index[d - 1] == box.chunk_shape[d - 1];) {
        index[--d] = 0;
      }
    }
  }
};

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

// Larger than a tile, in every order of the dimensions.
TEST(permuted_in_parts) {
  std::mt19937_64 random(23);
  for (const uint64_t item_bytes : {1, 2, 3, 4, 8, 16, 24}) {
    std::vector<int64_t> order{0, 1, 2};
    do {
      const std::vector<int64_t> shape{67, 5, 131};
      std::vector<int64_t> strides(3);
      int64_t step = 1;
      for (const int64_t d : order) {
        strides[d] = random() % 3 == 0 ? -step : step;
        step *= shape[d] + static_cast<int64_t>(random() % 2);
      }
      const auto bytes = static_cast<uint64_t>(step) * item_bytes;
      const std::vector<std::byte> memory = numbered(2 * bytes);
      const std::byte* origin = memory.data() + bytes;
      const std::vector<std::byte> image = dense_image({item_bytes, shape, strides}, origin);
      std::vector<std::byte> other(memory.size());
      const Strides strided(item_bytes, shape, strides);
      const Place from{const_cast<std::byte*>(origin), strided};
      const Place to{other.data() + bytes, strided};
      for (uint64_t at = 0; at < image.size();) {
        const uint64_t end =
            std::min<uint64_t>(at + 1 + random() % (image.size() / 2), image.size());
        std::vector<std::byte> out(end - at);
        EXPECT(gather_hashed(from, at, end, out.data()) == xxh3_64(image.data() + at, out.size()));
        EXPECT(std::memcmp(out.data(), image.data() + at, out.size()) == 0);
        scatter(out.data(), to, at, end);
        at = end;
      }
      EXPECT(dense_image({item_bytes, shape, strides}, other.data() + bytes) == image);
    } while (std::ranges::next_permutation(order).found);
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

// Past the caches, from and to every alignment, and nothing beside it.
TEST(copies_past_the_caches) {
  constexpr std::byte untouched{0xab};
  for (const uint64_t bytes : {0, 1, 63, 64, 65, 4096, 8191, 8192, 8193, 8256, 12'345, 300'001}) {
    const std::vector<std::byte> memory = numbered(bytes + 7);
    for (const uint64_t skew : {0, 1, 16, 63}) {
      std::vector<std::byte> expected(bytes + 2 * 64, untouched);
      std::vector<std::byte> copied = expected;
      std::vector<std::byte> hashed = expected;
      if (bytes > 0) std::memcpy(expected.data() + skew, memory.data() + 7, bytes);
      copy_nontemporal(memory.data() + 7, bytes, copied.data() + skew);
      EXPECT(copied == expected);
      const Place place{const_cast<std::byte*>(memory.data()), std::nullopt};
      const uint64_t sum = gather_hashed_nontemporal(place, 7, 7 + bytes, hashed.data() + skew);
      EXPECT(hashed == expected);
      EXPECT(sum == xxh3_64(memory.data() + 7, bytes));
    }
  }
}

TEST(strided_past_the_caches) {
  const std::vector<std::byte> memory = numbered(400 * 300);
  const Place place{const_cast<std::byte*>(memory.data()), Strides(1, {300, 400}, {1, 300})};
  std::vector<std::byte> expected(memory.size());
  std::vector<std::byte> got(memory.size());
  const uint64_t sum = gather_hashed(place, 0, memory.size(), expected.data());
  EXPECT(gather_hashed_nontemporal(place, 0, memory.size(), got.data()) == sum);
  EXPECT(got == expected);
}

TEST(boxes_in_parts) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 3000; ++round) {
    const BoxCase c(random);
    const std::vector<std::byte> image = numbered(c.chunk_bytes);
    std::vector<std::byte> expected(c.memory_bytes, std::byte{0xab});
    std::vector<std::byte> memory = expected;
    c.place(image.data(), expected.data());
    const Strides strides(c.item_bytes, c.box, c.strides);
    EXPECT(strides.bytes() == image.size());
    const uint64_t skip = random() % 3 == 0 ? random() % image.size() : 0;
    strides.scatter(image.data(), 0, skip, memory.data());
    const Place rest{memory.data(), strides, skip};
    for (uint64_t at = skip; at < image.size();) {
      const uint64_t end = std::min<uint64_t>(at + 1 + random() % 90, image.size());
      scatter(image.data() + at, rest, at - skip, end - skip);
      at = end;
    }
    EXPECT(memory == expected);
  }
}

TEST(impossible_boxes) {
  const auto make = [](ChunkBox box) { return Strides(4, box, {9, 1}); };
  EXPECT(make({{4, 5}, {1, 0}, {3, 5}}).bytes() == 80);
  EXPECT_THROWS(std::invalid_argument, make({{4, 5}, {2, 0}, {3, 5}}));
  EXPECT_THROWS(std::invalid_argument, make({{4, 5}, {-1, 0}, {3, 5}}));
  EXPECT_THROWS(std::invalid_argument, make({{4, 5}, {5, 0}, {0, 5}}));
  EXPECT_THROWS(std::invalid_argument, make({{4, -5}, {0, 0}, {0, 0}}));
  EXPECT_THROWS(std::invalid_argument, make({{4, 5}, {0}, {3, 5}}));
  EXPECT_THROWS(std::invalid_argument, make({{4, 5}, {0, 0}, {3}}));
  EXPECT_THROWS(std::invalid_argument, make({{4}, {0}, {3}}));
  EXPECT_THROWS(std::invalid_argument, make({{INT64_MAX, 5}, {INT64_MAX, 0}, {0, 0}}));
}

TEST(empty_and_impossible) {
  EXPECT(Strides(4, {3, 0}, {1, 1}).bytes() == 0);
  EXPECT_THROWS(std::invalid_argument, Strides(4, {3}, {1, 1}));
  EXPECT_THROWS(std::invalid_argument, Strides(0, {3}, {1}));
  EXPECT_THROWS(std::invalid_argument, Strides(4, {-1}, {1}));
}

TEST_MAIN

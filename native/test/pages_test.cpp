// Tables of pages and headers: what they say comes back, and damage ends no call badly.
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "page_header.h"
#include "page_table.h"
#include "test.h"

using namespace statehold;

namespace {

constexpr uint64_t kSlots = 17;
constexpr uint32_t kSeat = 3;
const std::string identity(kPageIdentityBytes, 'i');

std::vector<uint64_t> memory_of(uint64_t slots) {
  return std::vector<uint64_t>(PageTable::bytes(slots) / sizeof(uint64_t));
}

std::byte* bytes_of(std::vector<uint64_t>& memory) {
  return reinterpret_cast<std::byte*>(memory.data());
}

// One call of any kind; what it raises for damage is fine.
void call(PageTable& table, std::mt19937_64& dice) {
  const uint64_t slot = dice() % (kSlots + 2);
  try {
    switch (dice() % 9) {
      case 0:
        return void(table.find(dice() % 40));
      case 1:
        return void(table.take(kSeat, kSlots));
      case 2:
        return table.touch({static_cast<int64_t>(slot), 0});
      case 3:
        return table.free(slot);
      case 4:
        return table.hold(slot, kSeat);
      case 5:
        return table.release(slot);
      case 6:
        return void(table.space(std::to_string(1'000'000'000'000'000 + dice() % 100)));
      case 7:
        return table.cut(slot);
      default:
        return void(table.clear_seats({false, false, false, true}));
    }
  } catch (const std::out_of_range&) {
  } catch (const std::invalid_argument&) {
  }
}

}  // namespace

TEST(a_header_comes_back_or_is_none) {
  std::vector<std::byte> memory(kPageHeaderBytes);
  PageHeader header;
  header.identity = identity;
  header.key = "a key";
  header.bytes = 123;
  header.checksum = 7;
  header.before = 9;
  header.score = -1.5;
  header.write(memory.data());
  const auto found = PageHeader::read(memory.data());
  EXPECT(found && found->identity == identity && found->key == "a key" && found->bytes == 123);
  EXPECT(found->checksum == 7 && found->before == 9 && found->score == -1.5);
  for (const size_t at : {0u, 12u, 24u, 72u, 2000u, 4095u}) {
    memory[at] ^= std::byte{1};
    EXPECT(!PageHeader::read(memory.data()));
    memory[at] ^= std::byte{1};
  }
  header.key = "";
  EXPECT_THROWS(std::invalid_argument, header.write(memory.data()));
}

TEST(a_table_that_is_full_lets_the_least_used_page_go) {
  auto memory = memory_of(kSlots);
  PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), kSlots);
  EXPECT(table.is_new());
  table.create();
  const int64_t space = table.space(identity);
  for (uint64_t index = 1; index <= 3 * kSlots; ++index) {
    const int64_t slot = table.take(kSeat, kSlots);
    EXPECT(slot >= 0 && table.publish(slot, index, 0, space, 0));
    EXPECT(table.find(index) == slot);
  }
  for (uint64_t index = 1; index <= 3 * kSlots; ++index) {
    EXPECT((table.find(index) >= 0) == (index > 2 * kSlots));
  }
  EXPECT(table.pages() == kSlots && table.evicted() == 2 * kSlots);
}

TEST(damage_ends_no_call_badly) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    std::mt19937_64 dice(seed);
    auto memory = memory_of(kSlots);
    PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), kSlots);
    table.create();
    const int64_t space = table.space(identity);
    for (uint64_t index = 1; index <= kSlots; ++index) {
      table.publish(table.take(kSeat, kSlots), index, index - 1, space, double(index % 3));
    }
    const uint64_t from = seed % 2 == 0 ? 2 : memory.size() - 5 * kSlots;  // words, or columns
    for (int n = 0; n < (seed % 3 == 0 ? 1 : 50); ++n) {
      memory[from + dice() % (memory.size() - from)] ^= uint64_t{1} << dice() % 64;
    }
    for (int n = 0; n < 100; ++n) call(table, dice);
    table.mend();
    for (uint64_t index = 100; index < 100 + kSlots; ++index) {
      const int64_t slot = table.take(kSeat, kSlots);
      if (slot < 0) break;
      EXPECT(table.publish(slot, index, 0, 0, 0) || table.find(index) >= 0);
    }
  }
}

TEST_MAIN

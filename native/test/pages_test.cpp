// Tables of pages and headers: what they say comes back, and damage ends no call badly.
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
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
    switch (dice() % 12) {
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
      case 8:
        return table.count(kSeat, {1, dice()});
      case 9:
        return void(table.drop({}, dice() % 3, 1 + dice() % 4, dice() % 3));
      case 10: {
        std::array<std::byte, 3 * PageTable::kEntryBytes> entries;
        table.write_entries(slot % (kSlots - 2), 3, entries.data());
        return void(table.adopt_entries(dice() % kSlots, entries.data(), 3));
      }
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

TEST(pages_that_were_used_before_a_second_are_dropped_and_no_others) {
  auto memory = memory_of(kSlots);
  PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), kSlots);
  table.create();
  const std::string other(kPageIdentityBytes, 'o');
  for (uint32_t index = 1; index <= 8; ++index) {
    table.begin_change(100 + index);
    const int64_t space = table.space(index % 2 == 0 ? identity : other);
    table.publish(table.take(kSeat, kSlots), index, 0, space, 0);
    table.end_change();
  }
  table.begin_change(200);
  table.touch({table.find(1), table.find(2)});
  table.mend();  // the seconds are not made again
  EXPECT(table.drop({other}, 106, 10, 0).size() == 2);
  EXPECT(table.drop({identity}, 200, 1, 0).size() == 1);
  table.end_change();
  for (uint64_t index = 1; index <= 8; ++index) {
    EXPECT((table.find(index) >= 0) == (index != 3 && index != 4 && index != 5));
  }
}

TEST(what_was_counted_stays_when_its_identity_goes) {
  auto memory = memory_of(kSlots);
  PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), kSlots);
  table.create();
  table.seat(kSeat, table.space(identity));
  table.count(kSeat, {1, 0, 5});
  table.count(kSeat, {2});
  EXPECT(table.counted().size() == 1 && table.counted()[0].identity == identity);
  EXPECT(table.counted()[0].counts[0] == 3 && table.counted()[0].counts[2] == 5);
  table.seat(kSeat, -1);
  table.count(kSeat, {4});
  for (uint64_t n = 0; n < PageTable::kSpaces; ++n) {
    const auto name = std::to_string(1'000'000'000'000'000 + n);
    table.publish(table.take(kSeat, kSlots), n + 1, 0, table.space(name), 0);
  }
  const auto found = table.counted();
  EXPECT(found.back().identity.empty() && found.back().counts[0] == 7);
  EXPECT_THROWS(std::invalid_argument, table.count(PageTable::kSeats, {1}));
}

TEST(entries_make_a_table_again_and_those_that_are_damaged_name_nothing) {
  auto memory = memory_of(kSlots);
  PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), kSlots);
  table.create();
  for (uint64_t index = 1; index <= 6; ++index) {
    const auto slot = static_cast<uint64_t>(table.take(kSeat, kSlots));
    table.publish(slot, index, index - 1, table.space(identity), -2.5 * double(index % 3));
  }
  table.free(2);
  std::vector<std::byte> entries(kSlots * PageTable::kEntryBytes);
  table.write_entries(0, 10, entries.data());
  entries[4 * PageTable::kEntryBytes + 39] ^= std::byte{1};
  auto other = memory_of(kSlots);
  PageTable made(bytes_of(other), other.size() * sizeof(uint64_t), kSlots);
  made.create();
  using Rows = std::vector<std::pair<uint64_t, uint64_t>>;
  EXPECT((made.adopt_entries(0, entries.data(), kSlots) == Rows{{4, 1}, {10, 7}}));
  for (uint64_t index = 1; index <= 6; ++index) {
    const bool is_lost = index == 3 || index == 5;
    EXPECT(made.find(index) == (is_lost ? -1 : static_cast<int64_t>(index) - 1));
  }
  std::vector<std::byte> again(entries.size());
  made.write_entries(0, 10, again.data());
  for (uint64_t slot : {0, 1, 2, 3, 5, 6}) {
    const uint64_t at = slot * PageTable::kEntryBytes;
    EXPECT(std::memcmp(&entries[at], &again[at], PageTable::kEntryBytes) == 0);
  }
  EXPECT_THROWS(std::invalid_argument, made.adopt_entries(1, entries.data(), kSlots));
  EXPECT_THROWS(std::invalid_argument, made.write_entries(kSlots, 1, again.data()));
}

// As caches do it. A processor that stores, or loads, in another order than the program's shows one
// page's bytes under the generation of another.
TEST(a_slot_that_was_read_under_one_generation_had_one_page) {
  constexpr uint64_t rounds = 20'000;
  auto memory = memory_of(1);
  PageTable table(bytes_of(memory), memory.size() * sizeof(uint64_t), 1);
  table.create();
  const int64_t space = table.space(identity);
  std::array<std::atomic<uint64_t>, 64> page{};
  constexpr auto any_order = std::memory_order_relaxed;
  std::thread writer([&] {
    for (uint64_t index = 1; index <= rounds; ++index) {
      table.take(kSeat, 1);
      for (auto& word : page) word.store(index, any_order);
      table.publish(0, index, 0, space, 0);
    }
  });
  uint64_t torn = 0;
  for (uint64_t index = 0; index < rounds;) {
    const uint32_t generation = table.generation(0);
    index = table.index(0);
    if (table.find(index) != 0) continue;
    uint64_t others = 0;
    for (const auto& word : page) others += word.load(any_order) != index ? 1 : 0;
    if (table.generation(0) == generation && others > 0) ++torn;
  }
  writer.join();
  EXPECT(torn == 0);
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

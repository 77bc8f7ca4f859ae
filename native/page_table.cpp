// page_table: contract in page_table.h.
#include "page_table.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "checksum.h"
#include "page_header.h"

namespace statehold {
namespace {

constexpr uint64_t kTableMagic = 0x3442'4154'564B'4853;  // "SHKVTAB4"
constexpr uint64_t kWords = 16;
constexpr uint64_t kLongColumns = 2;
constexpr uint64_t kColumns = 7;
constexpr uint32_t kStateBits = 0xFF;
constexpr uint32_t kSpaceBits = 0xFF000000;
constexpr int kSeatShift = 8;
constexpr int kSpaceShift = 24;

uint64_t bucket_count(uint64_t slots) { return std::bit_ceil(std::max<uint64_t>(8, 2 * slots)); }

// What find() reads while another process changes it.
template <class T>
T fetch(const T& from) {
  return __atomic_load_n(&from, __ATOMIC_ACQUIRE);
}
template <class T>
void put(T& to, T value) {
  __atomic_store_n(&to, value, __ATOMIC_RELEASE);
}

[[noreturn]] void damaged() { throw std::out_of_range("the table of pages is damaged"); }

// An integer in the order of the scores: that of the bits of a float, in one direction.
uint32_t ranked(double score) {
  constexpr double most = 3.4e38;
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(std::clamp(score, -most, most)));
  return bits ^ (bits >> 31 != 0 ? 0xFFFFFFFF : 0x80000000);
}

double score_of(uint32_t rank) {
  return std::bit_cast<float>(rank ^ (rank >> 31 != 0 ? 0x80000000 : 0xFFFFFFFF));
}

struct Entry {
  uint64_t index = 0;
  uint64_t before = 0;
  char identity[kPageIdentityBytes] = {};
  uint32_t rank = 0;
  uint32_t sum = 0;

  uint32_t right_sum() const {
    return static_cast<uint32_t>(
        xxh3_64(reinterpret_cast<const std::byte*>(this), offsetof(Entry, sum)));
  }
};
static_assert(sizeof(Entry) == PageTable::kEntryBytes);

}  // namespace

PageTable::PageTable(std::byte* memory, uint64_t memory_bytes, uint64_t slots)
    : slots_(slots), mask_(bucket_count(slots) - 1) {
  if (slots >= UINT32_MAX || memory_bytes < bytes(slots) ||
      reinterpret_cast<uintptr_t>(memory) % alignof(uint64_t) != 0) {
    throw std::invalid_argument("the memory does not fit a table of so many slots");
  }
  words_ = reinterpret_cast<uint64_t*>(memory);
  spaces_ = reinterpret_cast<Space*>(words_ + kWords);
  seats_ = reinterpret_cast<uint64_t*>(spaces_ + kSpaces + 1);
  index_ = seats_ + kSeats;
  before_ = index_ + slots;
  auto* column = reinterpret_cast<uint32_t*>(before_ + slots);
  for (uint32_t** each :
       {&generation_, &state_, &used_, &newer_, &older_, &rank_, &second_, &bucket_}) {
    *each = column;
    column += slots;
  }
}

uint64_t PageTable::bytes(uint64_t slots) {
  const uint64_t words =
      kWords + (kSpaces + 1) * (sizeof(Space) / sizeof(uint64_t)) + kSeats + kLongColumns * slots;
  return sizeof(uint64_t) * (words + (kColumns * slots + bucket_count(slots) + 1) / 2);
}

bool PageTable::is_new() const {
  return words_[kMagicAt] != kTableMagic || words_[kSlots] != slots_;
}

void PageTable::create() {
  std::memset(words_, 0, bytes(slots_));  // another build may have left its own
  words_[kSlots] = slots_;
}

int64_t PageTable::find(uint64_t index) const {
  for (uint64_t at = 0; at <= mask_; ++at) {
    const uint32_t there = fetch(bucket_[(index + at) & mask_]);
    if (there == 0) break;
    if (there <= slots_ && fetch(index_[there - 1]) == index) return int64_t{there} - 1;
  }
  return -1;
}

uint32_t PageTable::generation(uint64_t slot) const {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);  // after the last byte that the caller has read
  return fetch(generation_[checked(slot)]);
}

uint64_t PageTable::index(uint64_t slot) const { return fetch(index_[checked(slot)]); }

uint64_t PageTable::pages() const {
  return std::accumulate(spaces_, spaces_ + kSpaces, uint64_t{0},
                         [](uint64_t sum, const Space& space) { return sum + space.pages; });
}

void PageTable::count(uint32_t seat, const std::vector<uint64_t>& amounts) {
  if (seat >= kSeats) throw std::invalid_argument("there is no such seat");
  Space& space = spaces_[std::min(fetch(seats_[seat]) - 1, kSpaces)];
  for (uint64_t i = 0; i < std::min<uint64_t>(kCounts, amounts.size()); ++i) {
    if (amounts[i] != 0) __atomic_fetch_add(&space.counts[i], amounts[i], __ATOMIC_RELAXED);
  }
}

std::vector<PageTable::Counted> PageTable::counted() const {
  std::vector<Counted> found;
  for (uint64_t i = 0; i <= kSpaces; ++i) {
    const Space& space = spaces_[i];
    std::vector<uint64_t> counts(space.counts, space.counts + kCounts);
    const bool is_counted =
        std::any_of(counts.begin(), counts.end(), [](auto n) { return n != 0; });
    if (space.pages == 0 && !is_counted) continue;
    found.push_back({i < kSpaces ? space.name() : "", space.pages, std::move(counts)});
  }
  return found;
}

void PageTable::begin_change(uint32_t now_s) {
  if (is_torn()) mend();
  now_s_ = now_s;
  put(words_[kChanges], words_[kChanges] + 1);
}

void PageTable::end_change() {
  words_[kMagicAt] = kTableMagic;
  ++words_[kChanges];
}

int64_t PageTable::take(uint32_t seat, uint64_t below) {
  int64_t slot = static_cast<int64_t>(words_[kFreeAt]) - 1;
  if (slot >= 0) words_[kFreeAt] = older_[checked(static_cast<uint64_t>(slot))];
  for (; slot < 0 && words_[kFresh] < std::min(below, slots_); ++words_[kFresh]) {
    // Some process may still fill a slot behind a cut.
    if (state_of(words_[kFresh]) != kFilling) slot = static_cast<int64_t>(words_[kFresh]);
  }
  if (slot < 0) {
    slot = oldest();
    if (slot < 0) return -1;
    unlink(static_cast<uint64_t>(slot));
    unhash(static_cast<uint64_t>(slot));
    ++words_[kEvicted];
  }
  put(generation_[slot], generation_[slot] + 1);
  __atomic_thread_fence(__ATOMIC_RELEASE);  // before the caller's first byte of another page
  state_[slot] = uint32_t{kFilling} | seat << kSeatShift;
  return slot;
}

bool PageTable::publish(uint64_t slot, uint64_t index, uint64_t before, int64_t space,
                        double score) {
  checked(slot);
  if (space < 0 || find(index) >= 0) return false;
  while (words_[kFresh] <= slot) {  // another process has cut the table meanwhile
    const uint64_t each = words_[kFresh]++;
    if (each != slot && state_of(each) == kFree) give_back(each);
  }
  fill(slot, index, before, static_cast<uint32_t>(space), score);
  hash(slot);
  link(slot);
  return true;
}

void PageTable::hold(uint64_t slot, uint32_t seat) {
  unlink(checked(slot));
  state_[slot] = uint32_t{kDirty} | seat << kSeatShift | (state_[slot] & kSpaceBits);
}

void PageTable::release(uint64_t slot) {
  state_[slot] = uint32_t{kWhole} | (state_[checked(slot)] & kSpaceBits);
  link(slot);
}

void PageTable::free(uint64_t slot) {
  const State state = state_of(checked(slot));
  if (state == kWhole) unlink(slot);
  if (state == kWhole || state == kDirty) unhash(slot);
  if (state == kFree) return;
  give_back(slot);
  put(generation_[slot], generation_[slot] + 1);
}

std::vector<PageTable::Dropped> PageTable::drop(const std::vector<std::string_view>& identities,
                                                uint32_t before_s, uint64_t most, uint64_t keep) {
  uint64_t spared = 0;  // a bit for each space
  for (uint64_t i = 0; i < kSpaces; ++i) {
    const bool is_named =
        std::find(identities.begin(), identities.end(), spaces_[i].name()) != identities.end();
    if (!identities.empty() && !is_named) spared |= uint64_t{1} << i;
  }
  std::vector<Dropped> dropped;
  for (bool is_mended = false; dropped.size() < most && pages() > keep;) {
    try {
      const int64_t slot = oldest(spared, before_s);
      if (slot < 0) break;
      const auto at = static_cast<uint64_t>(slot);
      const Space& space = space_of(at);
      if (state_of(at) != kWhole || (spared >> (&space - spaces_) & 1) != 0) damaged();
      free(at);
      dropped.push_back({at, space.name()});
    } catch (const std::out_of_range&) {
      if (is_mended) throw;
      is_mended = true;
      rebuild();
    }
  }
  return dropped;
}

void PageTable::cut(uint64_t below) {
  uint64_t end = std::min(words_[kFresh], slots_);
  while (end > below && state_of(end - 1) != kWhole && state_of(end - 1) != kDirty) --end;
  if (end >= words_[kFresh]) return;
  words_[kFresh] = end;
  rebuild();
}

void PageTable::touch(const std::vector<int64_t>& slots) {
  std::unordered_set<int64_t> seen;  // a page may come again after its own end
  for (int64_t slot : slots) {
    while (slot >= 0 && seen.insert(slot).second) {
      const uint64_t at = checked(static_cast<uint64_t>(slot));
      if (state_of(at) == kWhole) {
        unlink(at);
        link(at);
      }
      slot = before_[at] != 0 ? find(before_[at]) : -1;
    }
  }
}

int64_t PageTable::space(std::string_view identity) {
  uint64_t wanted[2];
  if (identity.size() != sizeof wanted) throw std::invalid_argument("an identity has 16 bytes");
  std::memcpy(wanted, identity.data(), sizeof wanted);
  const std::vector<bool> used = in_use();
  Space* spare = nullptr;
  for (uint64_t i = 0; i < kSpaces; ++i) {
    Space& space = spaces_[i];
    if (std::memcmp(space.identity, wanted, sizeof wanted) == 0) return static_cast<int64_t>(i);
    if (spare == nullptr && space.pages == 0 && !used[i]) spare = &space;
  }
  if (spare == nullptr) {
    spare = longest_unused(used);
    if (spare == nullptr) return -1;
    for (uint64_t left = slots_; spare->oldest != 0; --left) {
      if (left == 0) damaged();
      free(spare->oldest - 1);
    }
  }
  for (uint64_t i = 0; i < kCounts; ++i) {
    spaces_[kSpaces].counts[i] += std::exchange(spare->counts[i], 0);
  }
  std::memcpy(spare->identity, wanted, sizeof wanted);
  return spare - spaces_;
}

void PageTable::seat(uint32_t seat, int64_t space) {
  if (seat >= kSeats) throw std::invalid_argument("there is no such seat");
  seats_[seat] = static_cast<uint64_t>(space + 1);
}

std::vector<uint64_t> PageTable::clear_seats(const std::vector<bool>& dead) {
  for (uint64_t seat = 0; seat < std::min<uint64_t>(kSeats, dead.size()); ++seat) {
    if (dead[seat]) seats_[seat] = 0;
  }
  std::vector<uint64_t> dirty;
  for (uint64_t slot = 0; slot < std::min(words_[kFresh], slots_); ++slot) {
    const State state = state_of(slot);
    const uint32_t seat = state_[slot] >> kSeatShift & 0xFFFF;
    if ((state != kFilling && state != kDirty) || seat >= dead.size() || !dead[seat]) continue;
    if (state == kFilling) {
      free(slot);
    } else {
      dirty.push_back(slot);
    }
  }
  return dirty;
}

void PageTable::mend() {
  put(words_[kChanges], words_[kChanges] | 1);
  rebuild();
  end_change();
}

void PageTable::rebuild() {
  words_[kFreeAt] = 0;
  words_[kFresh] = std::min(words_[kFresh], slots_);
  for (uint64_t i = 0; i < kSpaces; ++i) {
    spaces_[i].pages = spaces_[i].newest = spaces_[i].oldest = 0;
  }
  std::memset(bucket_, 0, (mask_ + 1) * sizeof *bucket_);
  std::vector<uint64_t> order(words_[kFresh]);  // last use, slot
  for (uint64_t slot = 0; slot < order.size(); ++slot)
    order[slot] = slot | uint64_t{used_[slot]} << 32;
  std::sort(order.begin(), order.end());
  for (const uint64_t each : order) {
    const auto slot = static_cast<uint32_t>(each);
    const State state = state_of(slot);
    const bool has_page = (state == kWhole || state == kDirty) && find(index_[slot]) < 0 &&
                          state_[slot] >> kSpaceShift < kSpaces;
    if (has_page) {
      hash(slot);
      if (state == kWhole) link(slot, used_[slot]);
    } else if (state != kFilling) {
      give_back(slot);
    }
  }
}

void PageTable::adopt(uint64_t first, const std::byte* memory, uint64_t stride, uint64_t count) {
  check_slots(first, count);
  for (uint64_t slot = first; slot < first + count; ++slot, memory += stride) {
    const std::optional<PageHeader> header = PageHeader::read(memory);
    if (!header) continue;
    words_[kFresh] = std::max(words_[kFresh], slot + 1);
    publish(slot, page_index(header->identity, header->key), header->before,
            space(header->identity), header->score);
  }
}

void PageTable::write_entries(uint64_t first, uint64_t count, std::byte* memory) const {
  check_slots(first, count);
  for (uint64_t slot = first; slot < first + count; ++slot, memory += kEntryBytes) {
    Entry entry;
    const State state = state_of(slot);
    const uint32_t space = state_[slot] >> kSpaceShift;
    if ((state == kWhole || state == kDirty) && space < kSpaces) {
      entry.index = index_[slot];
      entry.before = before_[slot];
      std::memcpy(entry.identity, spaces_[space].identity, sizeof entry.identity);
      entry.rank = rank_[slot];
    }
    entry.sum = entry.right_sum();
    std::memcpy(memory, &entry, sizeof entry);
  }
}

std::vector<std::pair<uint64_t, uint64_t>> PageTable::adopt_entries(uint64_t first,
                                                                    const std::byte* memory,
                                                                    uint64_t count) {
  check_slots(first, count);
  std::vector<std::pair<uint64_t, uint64_t>> unknown;
  Entry last;  // most pages have the identity of the one before
  int64_t of_last = -1;
  for (uint64_t slot = first; slot < first + count; ++slot, memory += kEntryBytes) {
    Entry entry;
    std::memcpy(&entry, memory, sizeof entry);
    if (entry.sum != entry.right_sum()) {
      const bool goes_on = !unknown.empty() && unknown.back().first + unknown.back().second == slot;
      if (!goes_on) unknown.emplace_back(slot, 0);
      ++unknown.back().second;
    } else if (entry.rank != 0) {
      if (of_last < 0 || std::memcmp(last.identity, entry.identity, sizeof last.identity) != 0) {
        of_last = space({entry.identity, sizeof entry.identity});
      }
      last = entry;
      words_[kFresh] = std::max(words_[kFresh], slot + 1);
      publish(slot, entry.index, entry.before, of_last, score_of(entry.rank));
    }
  }
  return unknown;
}

void PageTable::check_slots(uint64_t first, uint64_t count) const {
  if (first > slots_ || count > slots_ - first) throw std::invalid_argument("no such slots");
}

uint64_t PageTable::checked(uint64_t slot) const {
  if (slot >= slots_) damaged();
  return slot;
}

PageTable::Space& PageTable::space_of(uint64_t slot) {
  const uint32_t space = state_[slot] >> kSpaceShift;
  if (space >= kSpaces) damaged();
  return spaces_[space];
}

PageTable::State PageTable::state_of(uint64_t slot) const {
  const uint32_t state = state_[slot] & kStateBits;
  return state <= kDirty ? static_cast<State>(state) : kFree;
}

void PageTable::fill(uint64_t slot, uint64_t index, uint64_t before, uint32_t space, double score) {
  if (space >= kSpaces) damaged();
  put(index_[slot], index);
  before_[slot] = before;
  rank_[slot] = ranked(score);
  if (score != 0) words_[kIsRanked] = 1;
  put(state_[slot], uint32_t{kWhole} | space << kSpaceShift);
}

void PageTable::give_back(uint64_t slot) {
  state_[slot] = kFree;
  if (slot >= words_[kFresh]) return;  // it has no storage
  older_[slot] = static_cast<uint32_t>(words_[kFreeAt]);
  words_[kFreeAt] = slot + 1;
}

void PageTable::hash(uint64_t slot) {
  for (uint64_t at = 0; at <= mask_; ++at) {
    uint32_t& bucket = bucket_[(index_[slot] + at) & mask_];
    if (bucket == 0) return put(bucket, static_cast<uint32_t>(slot + 1));
  }
  damaged();
}

// Those behind it move up, or find() would stop too early.
void PageTable::unhash(uint64_t slot) {
  uint64_t hole = index_[slot] & mask_;
  for (uint64_t left = mask_; bucket_[hole] != slot + 1; --left, hole = (hole + 1) & mask_) {
    if (bucket_[hole] == 0 || left == 0) return;
  }
  for (uint64_t n = 1, from = hole; n <= mask_; ++n) {
    const uint64_t at = (from + n) & mask_;
    if (bucket_[at] == 0) break;
    const uint64_t home = index_[checked(bucket_[at] - 1)] & mask_;
    if (((at - home) & mask_) < ((at - hole) & mask_)) continue;
    put(bucket_[hole], bucket_[at]);
    hole = at;
  }
  put(bucket_[hole], uint32_t{0});
}

void PageTable::link(uint64_t slot) {
  link(slot, static_cast<uint32_t>(++words_[kClock]));
  second_[slot] = now_s_;
}

void PageTable::link(uint64_t slot, uint32_t used) {
  Space& space = space_of(slot);
  used_[slot] = used;
  newer_[slot] = 0;
  older_[slot] = static_cast<uint32_t>(space.newest);
  if (space.newest != 0) {
    newer_[checked(space.newest - 1)] = static_cast<uint32_t>(slot + 1);
  } else {
    space.oldest = slot + 1;
  }
  space.newest = slot + 1;
  space.last_use = used;
  ++space.pages;
}

void PageTable::unlink(uint64_t slot) {
  Space& space = space_of(slot);
  const uint64_t newer = newer_[slot];
  const uint64_t older = older_[slot];
  if (newer != 0) {
    older_[checked(newer - 1)] = static_cast<uint32_t>(older);
  } else {
    space.newest = older;
  }
  if (older != 0) {
    newer_[checked(older - 1)] = static_cast<uint32_t>(newer);
  } else {
    space.oldest = newer;
  }
  --space.pages;
}

std::vector<bool> PageTable::in_use() const {
  std::vector<bool> used(kSpaces);
  for (uint64_t seat = 0; seat < kSeats; ++seat) {
    if (seats_[seat] > 0 && seats_[seat] <= kSpaces) used[seats_[seat] - 1] = true;
  }
  return used;
}

PageTable::Space* PageTable::longest_unused(const std::vector<bool>& used) {
  Space* found = nullptr;
  for (uint64_t i = 0; i < kSpaces; ++i) {
    if (used[i] || (found != nullptr && found->last_use <= spaces_[i].last_use)) continue;
    found = &spaces_[i];
  }
  return found;
}

// The slot whose page goes first, of those that were last used before a second. spared: a bit for
// each space that is left alone.
int64_t PageTable::oldest(uint64_t spared, uint32_t before_s) {
  const std::vector<bool> used = in_use();
  const Space* best = nullptr;
  std::pair<bool, uint64_t> best_key;
  for (uint64_t i = 0; i < kSpaces; ++i) {
    const Space& space = spaces_[i];
    if (space.oldest == 0 || (spared >> i & 1) != 0) continue;
    const uint64_t first = checked(space.oldest - 1);
    if (second_[first] >= before_s) continue;
    const uint64_t use = used[i] ? used_[first] : space.last_use;
    const std::pair<bool, uint64_t> key{used[i], use};
    if (best != nullptr && key >= best_key) continue;
    best = &space;
    best_key = key;
  }
  if (best == nullptr) return -1;
  const uint64_t slot = checked(best->oldest - 1);
  return static_cast<int64_t>(words_[kIsRanked] != 0 ? least(slot, before_s) : slot);
}

// The page of the lowest score, among `slot` and those that were used next.
uint64_t PageTable::least(uint64_t slot, uint32_t before_s) const {
  std::vector<uint64_t> followed;
  uint64_t best = slot;
  for (int n = 0; n < kRanked; ++n) {
    const bool is_followed =
        std::find(followed.begin(), followed.end(), index_[slot]) != followed.end();
    if (!is_followed && rank_[slot] < rank_[best]) best = slot;
    followed.push_back(before_[slot]);
    if (newer_[slot] == 0) break;
    slot = checked(newer_[slot] - 1);
    if (second_[slot] >= before_s) break;
  }
  return best;
}

}  // namespace statehold

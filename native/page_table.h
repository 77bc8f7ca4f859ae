// page_table: which slots of a tier hold which pages, in memory that all processes of a host map.
//
//     words     magic, slots, changes (odd: one is under way), free, fresh, clock, unused, evicted,
//               boot (of the host; 0 once all processes have closed the table), ranked (whether a
//               page has a score)
//     spaces    kSpaces times: identity, last use, pages, newest, oldest, kCounts counters; then
//               one more, for the counters of identities whose space was given away
//     seats     by process: 1 + its space; 0 without one
//     by slot   index of the key, index of the page before it; generation, state with seat and
//               space, last use, next newer, next older, rank (its score, in an order of integers),
//               second of the last use (Unix time)
//     buckets   open addressing: 1 + slot, or 0
//
// What a slot holds is also said by an entry beside the slots, so that a lost table is made again
// without the headers of all pages.
//
// A space is the pages of one identity, in the order of their use. A slot that is needed is taken
// from the space that nobody has used for longest. If all are in use, it is the slot that was used
// least recently. Using a page uses those before it, too, so a page never goes before one that
// follows it. With scores it is the page of the lowest score among the kRanked least recently used
// ones that no other one of them follows.
//
// Invariants:
// - The caller holds the lock of the tier, except for find(), index() and generation(). These may
//   see half a change. Then they miss a page, or name a slot of another one. The reader of a slot
//   looks at its generation, finds the page again, reads, and compares the generation. A slot gets
//   a new generation each time that it is taken, after find() has forgotten its page.
// - A process that dies inside a change leaves `changes` odd. mend() makes again what follows from
//   the columns. The counters stay as they are.
// - Nothing outside the memory is read or written, and every call ends, whatever a damaged table
//   says. A call that meets damage throws std::out_of_range, and mend() makes that good.
// - The table is only a hint: each page proves itself.
// Not here: the bytes of pages, the lock (kv/opened).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace statehold {

class PageTable {
 public:
  static constexpr uint64_t kSpaces = 64;
  static constexpr uint64_t kSeats = 256;
  // What processes count, by identity. The table does not know what it means.
  static constexpr uint64_t kCounts = 13;
  // Among how many pages a score decides. More would keep pages that nobody has used for long.
  static constexpr int kRanked = 16;
  // Of an entry: index of the page, index of the page before it, identity, rank (0: there is no
  // page), and the lower half of XXH3-64 of all that.
  static constexpr uint64_t kEntryBytes = 40;

  // Of a table in `memory`, which is zeros if it is new. Throws std::invalid_argument if it is
  // smaller than bytes(slots).
  PageTable(std::byte* memory, uint64_t memory_bytes, uint64_t slots);
  static uint64_t bytes(uint64_t slots);

  bool is_new() const;  // whether the memory has no table of this size
  void create();        // it stays new until its first change has ended

  // Without the lock.
  int64_t find(uint64_t index) const;  // the slot that may hold a page; -1 without one
  uint32_t generation(uint64_t slot) const;
  uint64_t index(uint64_t slot) const;
  uint64_t evicted() const { return words_[kEvicted]; }
  uint64_t pages() const;  // that can be found, and may go
  uint64_t slots() const { return slots_; }
  void count(uint32_t seat, const std::vector<uint64_t>& amounts);  // for the identity of a seat
  struct Counted {
    std::string_view identity;  // of the table; empty for those whose space was given away
    uint64_t pages;
    std::vector<uint64_t> counts;
  };
  std::vector<Counted> counted() const;  // what has pages, or was counted
  uint64_t boot() const { return words_[kBoot]; }
  void set_boot(uint64_t boot) { words_[kBoot] = boot; }

  // Around changes. begin_change() mends what a dead process has left. now_s: when the pages were
  // used that this change uses.
  bool is_torn() const { return words_[kChanges] % 2 != 0; }
  void begin_change(uint32_t now_s);
  void end_change();

  // A slot that is empty, or whose page has to go; it is FILLING then. -1 without one. Slots that
  // were never taken are taken only below `below`.
  int64_t take(uint32_t seat, uint64_t below);
  // From now on find() names a slot that was taken. False if another one has the page, or without
  // a space.
  bool publish(uint64_t slot, uint64_t index, uint64_t before, int64_t space, double score);
  // A published page is DIRTY: its slot is not given away before release().
  void hold(uint64_t slot, uint32_t seat);
  void release(uint64_t slot);
  void free(uint64_t slot);
  // Free the slots of pages that may go, in the order in which take() would: those of these
  // identities (of all, without one) that were not used since `before_s`, at most `most`, and none
  // while no more than `keep` pages are there. What is damaged is mended first.
  struct Dropped {
    uint64_t slot;
    std::string_view identity;  // of the table
  };
  std::vector<Dropped> drop(const std::vector<std::string_view>& identities, uint32_t before_s,
                            uint64_t most, uint64_t keep);
  // The slots from this one on have no storage: nobody takes them any more. Those up to the last
  // one with a page stay.
  void cut(uint64_t below);
  // Pages were used, and so were those before them. The last page of a prefix comes first.
  void touch(const std::vector<int64_t>& slots);

  // The number of the space of an identity. If there are too many, the oldest goes. -1 if processes
  // use all of them.
  int64_t space(std::string_view identity);
  void seat(uint32_t seat, int64_t space);  // -1: it uses none
  // Free what dead processes were filling; the slots that they have left DIRTY. dead: by seat.
  std::vector<uint64_t> clear_seats(const std::vector<bool>& dead);

  // Make lists and buckets again from the columns. A page that is there twice stays once.
  void mend();
  // Take up the pages whose headers are in `memory`, one for each slot from `first` on.
  void adopt(uint64_t first, const std::byte* memory, uint64_t stride, uint64_t count);
  // The entries of slots from `first` on, to `memory`.
  void write_entries(uint64_t first, uint64_t count, std::byte* memory) const;
  // Take up the pages that entries name. Returns the slots that they tell nothing of, because no
  // entry was written, or it is damaged: of each row of them the first, and their number.
  std::vector<std::pair<uint64_t, uint64_t>> adopt_entries(uint64_t first, const std::byte* memory,
                                                           uint64_t count);

 private:
  enum Word : uint8_t {
    kMagicAt,
    kSlots,
    kChanges,
    kFreeAt,
    kFresh,
    kClock,
    kUnused,
    kEvicted,
    kBoot,
    kIsRanked,
  };
  enum State : uint8_t { kFree, kFilling, kWhole, kDirty };

  struct Space {
    uint64_t identity[2];
    uint64_t last_use;
    uint64_t pages;
    uint64_t newest;  // 1 + slot
    uint64_t oldest;
    uint64_t counts[kCounts];

    std::string_view name() const { return {reinterpret_cast<const char*>(identity), 16}; }
  };

  uint64_t checked(uint64_t slot) const;
  void check_slots(uint64_t first, uint64_t count) const;
  Space& space_of(uint64_t slot);
  State state_of(uint64_t slot) const;
  void fill(uint64_t slot, uint64_t index, uint64_t before, uint32_t space, double score);
  void give_back(uint64_t slot);
  void hash(uint64_t slot);
  void unhash(uint64_t slot);
  void link(uint64_t slot);
  void link(uint64_t slot, uint32_t used);
  void unlink(uint64_t slot);
  void rebuild();
  std::vector<bool> in_use() const;
  Space* longest_unused(const std::vector<bool>& used);
  int64_t oldest(uint64_t spared = 0, uint32_t before_s = UINT32_MAX);
  uint64_t least(uint64_t slot, uint32_t before_s) const;

  uint64_t slots_ = 0;
  uint32_t now_s_ = 0;
  uint64_t mask_ = 0;
  uint64_t* words_ = nullptr;
  Space* spaces_ = nullptr;
  uint64_t* seats_ = nullptr;
  uint64_t* index_ = nullptr;  // by slot
  uint64_t* before_ = nullptr;
  uint32_t* generation_ = nullptr;
  uint32_t* state_ = nullptr;
  uint32_t* used_ = nullptr;
  uint32_t* newer_ = nullptr;  // 1 + slot
  uint32_t* older_ = nullptr;
  uint32_t* rank_ = nullptr;
  uint32_t* second_ = nullptr;
  uint32_t* bucket_ = nullptr;
};

}  // namespace statehold

// The table of what a block may become: from every state it can end, and nothing comes after that.
#include "block.h"

#include "test.h"

using namespace statehold;

namespace {

constexpr int kStages = static_cast<int>(Stage::dropped) + 1;

bool reaches(Stage from, Stage to, int steps = kStages) {
  if (from == to) return true;
  for (int next = 0; steps > 0 && next < kStages; ++next) {
    const auto stage = static_cast<Stage>(next);
    if (follows(from, stage) && reaches(stage, to, steps - 1)) return true;
  }
  return false;
}

}  // namespace

TEST(every_state_is_reached_and_can_end_either_way) {
  for (int each = 0; each < kStages; ++each) {
    const auto stage = static_cast<Stage>(each);
    EXPECT(reaches(Stage::free, stage));
    EXPECT(is_over(stage) || reaches(stage, Stage::done));
    EXPECT(is_over(stage) || follows(stage, Stage::dropped));
  }
}

TEST(what_is_over_stays_so) {
  for (const Stage over : {Stage::done, Stage::dropped}) {
    EXPECT(is_over(over));
    EXPECT(!is_queued(over));
    for (int next = 0; next < kStages; ++next) EXPECT(!follows(over, static_cast<Stage>(next)));
  }
}

TEST(what_waits_in_a_queue_is_done_only_after_somebody_has_had_it) {
  for (int each = 0; each < kStages; ++each) {
    const auto stage = static_cast<Stage>(each);
    // A cold block may be left as it is: a worker has proven that its file has it already.
    if (is_queued(stage) && stage != Stage::cold) EXPECT(!follows(stage, Stage::done));
    if (follows(stage, Stage::cold)) EXPECT(stage == Stage::working);
  }
}

TEST(states_are_not_skipped) {
  EXPECT(!follows(Stage::free, Stage::moving));      // no worker has had it
  EXPECT(!follows(Stage::offered, Stage::filled));   // Python has not had it
  EXPECT(!follows(Stage::lent, Stage::copied));      // what Python filled is not hashed
  EXPECT(!follows(Stage::copied, Stage::moving));    // nobody has handed it over
  EXPECT(!follows(Stage::moving, Stage::working));   // it has not arrived
  EXPECT(!follows(Stage::working, Stage::working));  // two workers
}

TEST_MAIN

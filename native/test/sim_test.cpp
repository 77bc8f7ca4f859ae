// The durability model: what was synced survives every crash, what was not need not.
#include <cerrno>
#include <set>

#include "sim_tree.h"
#include "test.h"

using namespace statehold;

namespace {

constexpr uint64_t kSeeds = 200;

void synced_file(SimTree& tree, const std::string& path, const std::string& text) {
  SimNodePtr node;
  EXPECT(tree.create(path, node) == 0);
  node->data.write(0, text);
  node->data.sync();
}

SimLoss crash(SimTree& tree, SimRandom& random) {
  SimChoices choices(random, 0);
  return tree.crash(choices);
}

std::string text_of(const SimTree& tree, const std::string& path) {
  const SimNodePtr node = tree.find(path);
  return node ? node->data.bytes() : "(none)";
}

}  // namespace

TEST(names) {
  SimTree tree;
  EXPECT(tree.mkdir("/a") == 0);
  EXPECT(tree.mkdir("a/") == EEXIST);
  EXPECT(tree.mkdir("b/c") == ENOENT);
  synced_file(tree, "a/x", "one");
  synced_file(tree, "a/y", "two");
  EXPECT(tree.exchange("a/x", "a/y") == 0);
  EXPECT(text_of(tree, "a/x") == "two");
  EXPECT(tree.rename("a/x", "a/y") == 0);
  EXPECT(text_of(tree, "a/y") == "two");
  EXPECT(!tree.find("a/x"));
  EXPECT(tree.rmdir("a") == ENOTEMPTY);
  EXPECT(tree.unlink("a") == EISDIR);
  EXPECT(tree.unlink("a/y") == 0);
  EXPECT(tree.unlink("a/y") == ENOENT);
  EXPECT(tree.rmdir("a") == 0);
}

TEST(synced_names_and_bytes_survive) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimTree tree;
    EXPECT(tree.mkdir("run") == 0);
    EXPECT(tree.sync_dir("/") == 0);
    synced_file(tree, "run/x", "kept");
    EXPECT(tree.sync_dir("run") == 0);
    tree.find("run/x")->data.write(0, "lost");
    EXPECT(crash(tree, random).torn == 0);
    const std::string text = text_of(tree, "run/x");
    EXPECT(text == "kept" || text == "lost");
  }
}

TEST(unsynced_outcomes_all_happen) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimTree tree;
    synced_file(tree, "old", "old");
    EXPECT(tree.sync_dir("/") == 0);
    synced_file(tree, "new", "new");
    EXPECT(tree.rename("new", "old") == 0);
    crash(tree, random);
    seen.insert(text_of(tree, "old") + "/" + text_of(tree, "new"));
  }
  // A prefix of (create, rename): never the new text in both places, never nothing at all.
  EXPECT(seen == (std::set<std::string>{"old/(none)", "old/new", "new/(none)"}));
}

TEST(sectors_and_size_are_old_or_new) {
  std::set<std::string> seen;
  uint64_t torn = 0;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimFileData data;
    data.write(0, "aaaa");
    data.sync();
    data.write(0, "bbbb");
    SimLoss loss;
    SimChoices often(random, 0.3), never(random, 0);
    data.crash(often, loss);
    torn += loss.torn;
    seen.insert(data.bytes());
    data.resize(2);
    data.crash(never, loss);
    EXPECT(data.bytes().size() == 2 || data.bytes().size() == 4);
  }
  EXPECT(torn > 0);
  EXPECT(seen == (std::set<std::string>{"aaaa", "bbbb", "bbaa"}));
}

TEST(rename_between_directories_is_atomic) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimTree tree;
    EXPECT(tree.mkdir("a") == 0);
    EXPECT(tree.mkdir("b") == 0);
    EXPECT(tree.sync_dir("/") == 0);
    synced_file(tree, "a/x", "text");
    EXPECT(tree.sync_dir("a") == 0);
    EXPECT(tree.rename("a/x", "b/x") == 0);
    if (seed % 2 == 0) EXPECT(tree.sync_dir("b") == 0);
    crash(tree, random);
    const bool moved = text_of(tree, "b/x") == "text";
    EXPECT(moved != (text_of(tree, "a/x") == "text"));
    EXPECT(moved || seed % 2 == 1);
  }
}

TEST(changes_of_different_names_survive_in_any_order) {
  std::set<std::string> seen;
  std::vector<int> choices;
  // Every outcome, by counting through the choices.
  for (bool more = true; more;) {
    SimTree tree;
    synced_file(tree, "x", "1");
    synced_file(tree, "y", "2");
    EXPECT(tree.sync_dir("/") == 0);
    EXPECT(tree.rename("x", "z") == 0);
    EXPECT(tree.unlink("y") == 0);
    EXPECT(tree.rename("z", "y") == 0);
    SimChoices given(choices);
    tree.crash(given);
    seen.insert(text_of(tree, "x") + text_of(tree, "y") + text_of(tree, "z"));
    choices.resize(given.arities().size());
    more = false;
    for (size_t at = choices.size(); at-- > 0 && !more;) {
      more = ++choices[at] < given.arities()[at];
      if (!more) choices.pop_back();
    }
  }
  EXPECT(seen == (std::set<std::string>{"12(none)", "(none)21", "1(none)(none)", "(none)(none)1",
                                        "(none)1(none)"}));
}

TEST(what_happened_in_a_removed_directory_may_outlive_the_removal) {
  bool emptied = false;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimTree tree;
    EXPECT(tree.mkdir("a") == 0);
    EXPECT(tree.sync_dir("/") == 0);
    synced_file(tree, "a/x", "text");
    EXPECT(tree.sync_dir("a") == 0);
    EXPECT(tree.unlink("a/x") == 0);
    EXPECT(tree.rmdir("a") == 0);
    crash(tree, random);
    emptied = emptied || (tree.find("a") && !tree.find("a/x"));
  }
  EXPECT(emptied);
}

TEST(a_second_name_survives_or_not_and_the_bytes_are_the_same) {
  std::set<std::string> seen;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimRandom random(seed);
    SimTree tree;
    synced_file(tree, "x", "old");
    EXPECT(tree.sync_dir("/") == 0);
    EXPECT(tree.mkdir("a") == 0);
    EXPECT(tree.sync_dir("/") == 0);
    tree.find("x")->data.write(0, "new");
    EXPECT(tree.link("x", "a/y") == 0);
    EXPECT(tree.link("x", "a/y") == EEXIST);
    EXPECT(tree.link("a", "b") == EPERM);
    EXPECT(tree.link("nothing", "b") == ENOENT);
    EXPECT(tree.name_count(tree.find("x")) == 2);
    SimTree copy = tree.clone();
    EXPECT(copy.name_count(copy.find("a/y")) == 2);
    crash(copy, random);
    if (copy.find("a/y")) EXPECT(text_of(copy, "a/y") == text_of(copy, "x"));
    seen.insert(text_of(copy, "x") + text_of(copy, "a/y"));
    EXPECT(tree.sync_dir("a") == 0);
    EXPECT(tree.unlink("x") == 0);
    EXPECT(tree.name_count(tree.find("a/y")) == 1);
    tree.find("a/y")->data.sync();
    crash(tree, random);
    EXPECT(text_of(tree, "a/y") == "new");
  }
  EXPECT(seen == (std::set<std::string>{"oldold", "newnew", "old(none)", "new(none)"}));
}

TEST(a_clone_is_independent_and_crashes_alike) {
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SimTree tree;
    EXPECT(tree.mkdir("a") == 0);
    synced_file(tree, "a/x", "one");
    EXPECT(tree.sync_dir("a") == 0);
    synced_file(tree, "b", "two");
    EXPECT(tree.rename("b", "a/b") == 0);
    SimTree copy = tree.clone();
    SimRandom first(seed), second(seed);
    crash(tree, first);
    EXPECT(text_of(copy, "a/b") == "two");
    crash(copy, second);
    for (const char* path : {"a/x", "b", "a/b"}) EXPECT(text_of(copy, path) == text_of(tree, path));
  }
}

TEST(a_forgotten_write_is_not_saved_by_the_next_sync) {
  SimFileData data;
  data.write(0, "aaaa");
  data.sync();
  data.write(0, "bbbb");
  data.forget();
  data.sync();
  EXPECT(data.bytes() == "bbbb");
  SimChoices none({});
  SimLoss loss;
  data.crash(none, loss);
  EXPECT(data.bytes() == "aaaa");
}

TEST_MAIN

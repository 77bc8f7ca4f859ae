// sim_tree: the files and names of a simulated disk, each in two versions: what a process sees
// now, and what a crash leaves.
//
// Durability model, weaker than any real file system that keeps its promises:
// - A file's sectors (4 KiB) written since its last sync are each old, new, or torn (half of each)
//   after a crash; so is its size, old or new.
// - Of the changes of names since the last sync_dir any may survive, in any order, except that two
//   changes of one name stay in order: the later one never survives without the earlier one. A
//   rename or exchange of two names survives for both or for neither.
// - A file with several names is one file: its sectors survive, or not, for all of them.
// SimChoices decides what happens to each: at random, or by a list, so that all can be tried.
// Not synchronised, no faults: that is fs_sim.h.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace statehold {

using SimRandom = std::mt19937_64;

// What survives a crash: drawn, or replayed from a list (0 beyond its end). `arities` says between
// how many outcomes each choice was, which is what it takes to enumerate them.
class SimChoices {
 public:
  enum class Sector : uint8_t { old, fresh, torn };

  SimChoices(SimRandom& random, double torn) : random_(&random), torn_(torn) {}
  explicit SimChoices(std::vector<int> given) : given_(std::move(given)) {}

  bool survives();
  Sector sector();
  const std::vector<int>& arities() const { return arities_; }

 private:
  int replay(int arity);

  SimRandom* random_ = nullptr;
  double torn_ = 0;
  std::vector<int> given_;
  std::vector<int> arities_;
};

// What a crash took away.
struct SimLoss {
  uint64_t names = 0;
  uint64_t sectors = 0;
  uint64_t torn = 0;
};

class SimFileData {
 public:
  const std::string& bytes() const { return now_; }
  void write(uint64_t offset, std::string_view data);  // grows the file when needed
  void resize(uint64_t bytes);
  void sync();
  // What a failed sync may do: the system takes the pages for clean, and no later sync writes them.
  void forget() { dirty_.clear(); }
  // Flips bits in both versions: rot on the medium.
  void corrupt(uint64_t offset, uint8_t mask);
  // Puts bytes in both versions that were meant for another place; what does not fit is dropped.
  void overwrite_misdirected(uint64_t offset, std::string_view data);
  void crash(SimChoices& choices, SimLoss& loss);

 private:
  void mark_dirty(uint64_t begin, uint64_t end);

  std::string now_;
  std::string durable_;
  std::vector<bool> dirty_;  // per sector
};

struct SimNode;
using SimNodePtr = std::shared_ptr<SimNode>;

// One atomic change of names, in one or two directories.
struct NameChange {
  struct Part {
    std::weak_ptr<SimNode> dir;
    std::string name;
    SimNodePtr node;  // null: the name goes away
  };
  uint64_t order = 0;  // among all changes of the tree
  std::vector<Part> parts;
};

struct SimNode {
  explicit SimNode(bool directory) : is_dir(directory) {}

  const bool is_dir;
  SimFileData data;  // of a file
  int open_count = 0;
  bool damaged = false;  // by rot or a misdirected write since it was opened for writing

  using Names = std::map<std::string, SimNodePtr>;
  Names names;  // of a directory
  Names durable_names;
  std::deque<std::shared_ptr<NameChange>> pending;  // since durable_names
};

// Paths are split at '/'; empty and "." parts are skipped. Functions return an errno, or 0.
class SimTree {
 public:
  SimTree() : root_(std::make_shared<SimNode>(true)) {}

  SimNodePtr find(const std::string& path) const;  // null: no such path
  int mkdir(const std::string& path);
  int create(const std::string& path, SimNodePtr& node);  // EEXIST when there is one
  int rename(const std::string& from, const std::string& to);
  int exchange(const std::string& a, const std::string& b);
  int link(const std::string& from, const std::string& to);
  int unlink(const std::string& path);
  int rmdir(const std::string& path);
  int sync_dir(const std::string& path);
  uint64_t name_count(const SimNodePtr& node) const;
  uint64_t used_bytes() const;
  std::vector<std::pair<std::string, SimNodePtr>> files() const;  // by path
  SimTree clone() const;
  SimLoss crash(SimChoices& choices);

 private:
  struct Slot {  // a name in a directory that exists
    SimNodePtr dir;
    std::string name;
    SimNodePtr node() const;
  };

  int locate(const std::string& path, Slot& slot) const;
  int add(const std::string& path, SimNodePtr node);
  void change(std::vector<std::pair<Slot, SimNodePtr>> parts);
  std::vector<std::shared_ptr<NameChange>> pending() const;  // in order

  SimNodePtr root_;
  uint64_t changes_ = 0;
};

}  // namespace statehold

// sim_tree: the files and names of a simulated disk, each in two versions: what a process sees
// now, and what a crash leaves.
//
// Durability model, weaker than any real file system that keeps its promises:
// - A file's sectors (4 KiB) written since its last sync are each old, new, or torn (half of each)
//   after a crash; so is its size, old or new.
// - Changes of names in a directory since its last sync_dir survive as a prefix of their order,
//   chosen per directory. A rename between two directories survives in both or in neither.
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

class SimFileData {
 public:
  const std::string& bytes() const { return now_; }
  void write(uint64_t offset, std::string_view data);  // grows the file when needed
  void resize(uint64_t bytes);
  void sync();
  // Flips bits in both versions: rot on the medium.
  void corrupt(uint64_t offset, uint8_t mask);
  // Returns how many sectors were torn.
  uint64_t crash(SimRandom& random, double torn);

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
  std::vector<Part> parts;
};

struct SimNode {
  explicit SimNode(bool directory) : is_dir(directory) {}

  const bool is_dir;
  SimFileData data;  // of a file
  int open_count = 0;

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
  int unlink(const std::string& path);
  int rmdir(const std::string& path);
  int sync_dir(const std::string& path);
  uint64_t used_bytes() const;
  uint64_t crash(SimRandom& random, double torn);  // returns how many sectors were torn

 private:
  struct Slot {  // a name in a directory that exists
    SimNodePtr dir;
    std::string name;
    SimNodePtr node() const;
  };

  int locate(const std::string& path, Slot& slot) const;
  int add(const std::string& path, SimNodePtr node);
  void change(std::vector<std::pair<Slot, SimNodePtr>> parts);

  SimNodePtr root_;
};

}  // namespace statehold

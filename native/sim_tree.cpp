// sim_tree: contract in sim_tree.h.
#include "sim_tree.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>

#include "fs.h"

namespace statehold {
namespace {

std::vector<std::string> split(const std::string& path) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= path.size();) {
    const size_t slash = std::min(path.find('/', at), path.size());
    const std::string part = path.substr(at, slash - at);
    if (!part.empty() && part != ".") parts.push_back(part);
    at = slash + 1;
  }
  return parts;
}

void apply(SimNode::Names& names, const NameChange::Part& part) {
  if (part.node) {
    names[part.name] = part.node;
  } else {
    names.erase(part.name);
  }
}

void apply_durably(const NameChange& change) {
  for (const NameChange::Part& part : change.parts) {
    if (const SimNodePtr dir = part.dir.lock()) apply(dir->durable_names, part);
  }
}

// Makes the first `count` pending changes of a directory durable, and with a change that also
// concerns another directory all that came before it there.
void commit(SimNode& dir, size_t count) {
  for (; count > 0; --count) {
    const std::shared_ptr<NameChange> change = dir.pending.front();
    for (const NameChange::Part& part : change->parts) {
      const SimNodePtr other = part.dir.lock();
      if (!other || other.get() == &dir) continue;
      const auto at = std::ranges::find(other->pending, change);
      if (at != other->pending.end()) {
        commit(*other, static_cast<size_t>(at - other->pending.begin()));
        other->pending.pop_front();
      }
    }
    dir.pending.pop_front();
    apply_durably(*change);
  }
}

using Seen = std::set<const SimNode*>;

template <class Visit>
void visit_all(const SimNodePtr& node, Seen& seen, bool now, bool durable, Visit&& visit) {
  if (!seen.insert(node.get()).second) return;
  visit(*node);
  for (const auto* names : {now ? &node->names : nullptr, durable ? &node->durable_names : nullptr})
    if (names)
      for (const auto& [name, child] : *names) visit_all(child, seen, now, durable, visit);
}

void list_files(const SimNodePtr& node, const std::string& path,
                std::vector<std::pair<std::string, SimNodePtr>>& found) {
  if (!node->is_dir) found.emplace_back(path, node);
  const std::string prefix = path + '/';
  for (const auto& [name, child] : node->names) list_files(child, prefix + name, found);
}

// Copies nodes with all that they lead to, each once.
class Cloner {
 public:
  SimNodePtr node(const SimNodePtr& from) {
    if (!from) return nullptr;
    SimNodePtr& to = nodes_[from.get()];
    if (to) return to;
    const SimNodePtr copy = to = std::make_shared<SimNode>(from->is_dir);
    copy->data = from->data;
    copy->damaged = from->damaged;
    for (const auto& [name, child] : from->names) copy->names[name] = node(child);
    for (const auto& [name, child] : from->durable_names) copy->durable_names[name] = node(child);
    for (const auto& each : from->pending) copy->pending.push_back(change(each));
    return copy;
  }

 private:
  std::shared_ptr<NameChange> change(const std::shared_ptr<NameChange>& from) {
    std::shared_ptr<NameChange>& to = changes_[from.get()];
    if (to) return to;
    const std::shared_ptr<NameChange> copy = to = std::make_shared<NameChange>();
    copy->order = from->order;
    for (const NameChange::Part& part : from->parts) {
      copy->parts.push_back({node(part.dir.lock()), part.name, node(part.node)});
    }
    return copy;
  }

  std::map<const SimNode*, SimNodePtr> nodes_;
  std::map<const NameChange*, std::shared_ptr<NameChange>> changes_;
};

}  // namespace

int SimChoices::replay(int arity) {
  const size_t index = arities_.size();
  arities_.push_back(arity);
  return index < given_.size() ? std::clamp(given_[index], 0, arity - 1) : 0;
}

bool SimChoices::survives() { return random_ ? ((*random_)() >> 32) % 2 == 0 : replay(2) == 1; }

SimChoices::Sector SimChoices::sector() {
  if (!random_) return static_cast<Sector>(replay(3));
  if (std::uniform_real_distribution<>(0, 1)(*random_) < torn_) return Sector::torn;
  return survives() ? Sector::fresh : Sector::old;
}

void SimFileData::mark_dirty(uint64_t begin, uint64_t end) {
  const uint64_t sectors = align_up(std::max(end, now_.size()), kPageBytes) / kPageBytes;
  if (dirty_.size() < sectors) dirty_.resize(sectors);
  for (uint64_t s = begin / kPageBytes; s * kPageBytes < end; ++s) dirty_[s] = true;
}

void SimFileData::write(uint64_t offset, std::string_view data) {
  if (offset + data.size() > now_.size()) resize(offset + data.size());
  std::ranges::copy(data, now_.begin() + static_cast<ptrdiff_t>(offset));
  mark_dirty(offset, offset + data.size());
}

void SimFileData::resize(uint64_t bytes) {
  mark_dirty(std::min<uint64_t>(bytes, now_.size()), std::max<uint64_t>(bytes, now_.size()));
  now_.resize(bytes);
}

void SimFileData::sync() {
  durable_.resize(now_.size());
  for (uint64_t s = 0; s < dirty_.size(); ++s) {
    const uint64_t begin = s * kPageBytes;
    if (dirty_[s] && begin < now_.size())
      durable_.replace(begin, kPageBytes, now_, begin, kPageBytes);
  }
  dirty_.clear();
}

void SimFileData::corrupt(uint64_t offset, uint8_t mask) {
  for (std::string* version : {&now_, &durable_}) {
    if (offset < version->size()) (*version)[offset] = static_cast<char>((*version)[offset] ^ mask);
  }
}

void SimFileData::overwrite_misdirected(uint64_t offset, std::string_view data) {
  for (std::string* version : {&now_, &durable_}) {
    if (offset >= version->size()) continue;
    const uint64_t bytes = std::min<uint64_t>(data.size(), version->size() - offset);
    version->replace(offset, bytes, data, 0, bytes);
  }
}

void SimFileData::crash(SimChoices& choices, SimLoss& loss) {
  if (now_.size() != durable_.size() && choices.survives()) durable_.resize(now_.size());
  now_.resize(durable_.size());  // what lies behind the old size is gone
  for (uint64_t s = 0; s < dirty_.size(); ++s) {
    const uint64_t begin = s * kPageBytes;
    if (!dirty_[s] || begin >= now_.size()) continue;
    const uint64_t bytes = std::min(kPageBytes, now_.size() - begin);
    const SimChoices::Sector sector = choices.sector();
    loss.sectors += sector == SimChoices::Sector::old;
    loss.torn += sector == SimChoices::Sector::torn;
    if (sector == SimChoices::Sector::old) continue;
    const uint64_t kept = sector == SimChoices::Sector::torn ? bytes / 2 : bytes;
    durable_.replace(begin, kept, now_, begin, kept);
  }
  now_ = durable_;
  dirty_.clear();
}

SimNodePtr SimTree::Slot::node() const {
  const auto found = dir->names.find(name);
  return found == dir->names.end() ? nullptr : found->second;
}

SimNodePtr SimTree::find(const std::string& path) const {
  SimNodePtr node = root_;
  for (const std::string& part : split(path)) {
    const auto found = node->names.find(part);
    if (found == node->names.end()) return nullptr;
    node = found->second;
  }
  return node;
}

int SimTree::locate(const std::string& path, Slot& slot) const {
  std::vector<std::string> parts = split(path);
  if (parts.empty()) return EBUSY;  // the root
  slot.name = parts.back();
  parts.pop_back();
  slot.dir = root_;
  for (const std::string& part : parts) {
    const auto found = slot.dir->names.find(part);
    if (found == slot.dir->names.end()) return ENOENT;
    if (!found->second->is_dir) return ENOTDIR;
    slot.dir = found->second;
  }
  return 0;
}

void SimTree::change(std::vector<std::pair<Slot, SimNodePtr>> parts) {
  const auto change = std::make_shared<NameChange>();
  change->order = ++changes_;
  for (auto& [slot, node] : parts) change->parts.push_back({slot.dir, slot.name, std::move(node)});
  for (const NameChange::Part& part : change->parts) {
    const SimNodePtr dir = part.dir.lock();
    apply(dir->names, part);
    if (dir->pending.empty() || dir->pending.back() != change) dir->pending.push_back(change);
  }
}

int SimTree::add(const std::string& path, SimNodePtr node) {
  Slot slot;
  if (const int error = locate(path, slot); error != 0) return error;
  if (slot.node()) return EEXIST;
  change({{slot, std::move(node)}});
  return 0;
}

int SimTree::mkdir(const std::string& path) { return add(path, std::make_shared<SimNode>(true)); }

int SimTree::create(const std::string& path, SimNodePtr& node) {
  node = std::make_shared<SimNode>(false);
  return add(path, node);
}

int SimTree::rename(const std::string& from, const std::string& to) {
  Slot source, target;
  if (const int error = locate(from, source); error != 0) return error;
  if (const int error = locate(to, target); error != 0) return error;
  const SimNodePtr node = source.node();
  const SimNodePtr replaced = target.node();
  if (!node) return ENOENT;
  if (node == replaced) return 0;
  if (replaced && replaced->is_dir != node->is_dir) return node->is_dir ? ENOTDIR : EISDIR;
  if (replaced && !replaced->names.empty()) return ENOTEMPTY;
  change({{source, nullptr}, {target, node}});
  return 0;
}

int SimTree::exchange(const std::string& a, const std::string& b) {
  Slot first, second;
  if (const int error = locate(a, first); error != 0) return error;
  if (const int error = locate(b, second); error != 0) return error;
  const SimNodePtr node = first.node();
  const SimNodePtr other = second.node();
  if (!node || !other) return ENOENT;
  change({{first, other}, {second, node}});
  return 0;
}

int SimTree::link(const std::string& from, const std::string& to) {
  const SimNodePtr node = find(from);
  if (!node) return ENOENT;
  return node->is_dir ? EPERM : add(to, node);
}

int SimTree::unlink(const std::string& path) {
  Slot slot;
  if (const int error = locate(path, slot); error != 0) return error;
  if (!slot.node()) return ENOENT;
  if (slot.node()->is_dir) return EISDIR;
  change({{slot, nullptr}});
  return 0;
}

int SimTree::rmdir(const std::string& path) {
  Slot slot;
  if (const int error = locate(path, slot); error != 0) return error;
  if (!slot.node()) return ENOENT;
  if (!slot.node()->is_dir) return ENOTDIR;
  if (!slot.node()->names.empty()) return ENOTEMPTY;
  change({{slot, nullptr}});
  return 0;
}

int SimTree::sync_dir(const std::string& path) {
  const SimNodePtr dir = find(path);
  if (!dir) return ENOENT;
  if (!dir->is_dir) return ENOTDIR;
  commit(*dir, dir->pending.size());
  return 0;
}

uint64_t SimTree::name_count(const SimNodePtr& node) const {
  return static_cast<uint64_t>(
      std::ranges::count_if(files(), [&](const auto& file) { return file.second == node; }));
}

uint64_t SimTree::used_bytes() const {
  uint64_t bytes = 0;
  Seen seen;
  visit_all(root_, seen, true, false, [&](SimNode& node) { bytes += node.data.bytes().size(); });
  return bytes;
}

std::vector<std::pair<std::string, SimNodePtr>> SimTree::files() const {
  std::vector<std::pair<std::string, SimNodePtr>> found;
  list_files(root_, "", found);
  return found;
}

SimTree SimTree::clone() const {
  SimTree copy;
  copy.root_ = Cloner().node(root_);
  copy.changes_ = changes_;
  return copy;
}

std::vector<std::shared_ptr<NameChange>> SimTree::pending() const {
  std::map<uint64_t, std::shared_ptr<NameChange>> found;
  Seen seen;
  // Directories that were removed, too: a crash may undo that and keep what happened in them.
  visit_all(root_, seen, true, true, [&](SimNode& dir) {
    for (const auto& change : dir.pending) found[change->order] = change;
  });
  std::vector<std::shared_ptr<NameChange>> changes;
  changes.reserve(found.size());
  for (auto& [order, change] : found) changes.push_back(std::move(change));
  return changes;
}

SimLoss SimTree::crash(SimChoices& choices) {
  SimLoss loss;
  std::set<std::pair<const SimNode*, std::string>> lost;
  for (const auto& change : pending()) {
    const bool possible = std::ranges::none_of(change->parts, [&](const NameChange::Part& part) {
      return lost.contains({part.dir.lock().get(), part.name});
    });
    if (possible && choices.survives()) {
      apply_durably(*change);
      continue;
    }
    ++loss.names;
    for (const NameChange::Part& part : change->parts) {
      lost.insert({part.dir.lock().get(), part.name});
    }
  }
  Seen seen;
  visit_all(root_, seen, false, true, [&](SimNode& node) {
    node.pending.clear();
    node.names = node.durable_names;
    if (!node.is_dir) node.data.crash(choices, loss);
  });
  return loss;
}

}  // namespace statehold

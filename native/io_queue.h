// io_queue: transfers that wait for their turn; reads before writes, each in order.
// Links the requests themselves, so nothing here needs memory, or throws.
// Not synchronised: the owner's mutex guards it.
#pragma once

#include <memory>
#include <utility>

#include "fs.h"

namespace statehold {

class IoList {
 public:
  IoList() = default;
  IoList(const IoList&) = delete;
  IoList& operator=(const IoList&) = delete;
  ~IoList() {
    while (!empty()) pop();  // one by one: a chain would be destroyed by recursion
  }

  bool empty() const noexcept { return first_ == nullptr; }

  void push(std::unique_ptr<IoRequest> request) noexcept {
    IoRequest* added = request.get();
    (empty() ? first_ : last_->next) = std::move(request);
    last_ = added;
  }

  // Null when empty.
  std::unique_ptr<IoRequest> pop() noexcept {
    std::unique_ptr<IoRequest> request = std::move(first_);
    if (request) first_ = std::move(request->next);
    return request;
  }

 private:
  std::unique_ptr<IoRequest> first_;
  IoRequest* last_ = nullptr;  // unless empty
};

class IoQueue {
 public:
  bool empty() const noexcept { return reads_.empty() && writes_.empty(); }

  void push(std::unique_ptr<IoRequest> request) noexcept {
    (request->kind == IoRequest::Kind::read ? reads_ : writes_).push(std::move(request));
  }

  std::unique_ptr<IoRequest> pop() noexcept { return (reads_.empty() ? writes_ : reads_).pop(); }

 private:
  IoList reads_;
  IoList writes_;
};

}  // namespace statehold

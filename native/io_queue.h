// io_queue: transfers that wait for their turn; reads before writes, each in order.
// Not synchronised: the owner's mutex guards it.
#pragma once

#include <deque>
#include <utility>

#include "fs.h"

namespace statehold {

class IoQueue {
 public:
  bool empty() const { return reads_.empty() && writes_.empty(); }

  void push(IoRequest request) {
    auto& queue = request.kind == IoRequest::Kind::read ? reads_ : writes_;
    queue.push_back(std::move(request));
  }

  IoRequest pop() {
    CHECK(!empty());
    auto& queue = reads_.empty() ? writes_ : reads_;
    IoRequest request = std::move(queue.front());
    queue.pop_front();
    return request;
  }

 private:
  std::deque<IoRequest> reads_;
  std::deque<IoRequest> writes_;
};

}  // namespace statehold

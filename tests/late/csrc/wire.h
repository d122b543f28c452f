// The connections of one communicator, and what its kernels do over them.
//
// NCCL's life of a communicator: one rank is the root, whose address the others get by other means; then all connect on
// a thread of their own. A kernel whose peer has ended does not end: it hangs, and the communicator has an error for
// those who ask. After an abort every kernel ends, and leaves garbage.
#pragma once

#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace late {

constexpr int kSliceMs = 10;  // how long an abort may go unnoticed by a kernel that waits

struct Aborted : std::runtime_error {
  Aborted() : std::runtime_error("aborted") {}
};
// A connection broke, or the peers do not do the same. Nobody is told but who asks.
struct RemoteError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Part {
  int peer;
  void* data;
  size_t bytes;
};

inline int socket_fd() {
  int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) throw RemoteError(std::string("socket: ") + std::strerror(errno));
  return fd;
}

inline sockaddr_in loopback(int port) {
  sockaddr_in a{};
  a.sin_family = AF_INET;
  a.sin_port = htons(port);
  a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return a;
}

// Where a root is found by the others; they are told its port.
struct Listener {
  Listener() : fd(socket_fd()) {
    auto a = loopback(0);
    socklen_t n = sizeof(a);
    if (::bind(fd, (sockaddr*)&a, n) != 0 || ::listen(fd, 1024) != 0 || ::getsockname(fd, (sockaddr*)&a, &n) != 0)
      throw RemoteError(std::string("listen: ") + std::strerror(errno));
    port = ntohs(a.sin_port);
  }
  ~Listener() { ::close(fd); }
  Listener(const Listener&) = delete;

  const int fd;
  int port;
};

class Communicator {
 public:
  // `generation` tells the peers of this communicator from those of an older one that come late.
  Communicator(int rank, int size, int64_t generation = 0)
      : rank(rank), size(size), generation_(generation), peers_(size, -1), sent_(size), received_(size) {}

  ~Communicator() {
    abort();
    if (connecting_.joinable()) connecting_.join();
    for (int fd : peers_) close_fd(fd);
  }

  // Connects with all peers on a thread, until done() or error().
  void connect(int root_port, std::shared_ptr<Listener> root) {
    connecting_ = std::thread([this, root_port, root = std::move(root)] {
      try {
        connect_all(root_port, root.get());
        std::lock_guard<std::mutex> g(mutex_);
        connected_ = true;
      } catch (const Aborted&) {
      } catch (const std::exception& e) {
        fail(std::string("while connecting: ") + e.what());
      }
      changed_.notify_all();
    });
  }

  bool connected() const { return connected_; }
  bool aborted() const { return aborted_; }
  // As NCCL, which connects for an algorithm when an operation first needs it, and chooses it by the size.
  bool uses_first(const char* algorithm) {
    std::lock_guard<std::mutex> g(mutex_);
    return algorithms_.insert(algorithm).second;
  }
  std::string error() const {
    std::lock_guard<std::mutex> g(mutex_);
    return error_;
  }

  // Ends what runs and what is queued; returns when no kernel runs any more.
  void abort() {
    {
      std::lock_guard<std::mutex> g(mutex_);
      aborted_ = true;
      for (int fd : peers_)
        if (fd >= 0) ::shutdown(fd, SHUT_RDWR);
    }
    changed_.notify_all();
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(10), [&] { return running_ == 0; });
  }

  // For the launch of a kernel: kernels of one communicator run in the order of their launches, whatever the stream.
  int64_t ticket() { return tickets_++; }

  // A kernel, on a stream's thread. Returns when it ended well, or was aborted: then `outputs` are garbage.
  void run(int64_t ticket, c10d::OpType kind, const std::vector<at::Tensor>& outputs, const std::function<void()>& kernel) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return aborted_ || turn_ == ticket; });
    bool well = false;
    running_++;
    if (!aborted_) {
      kind_ = kind;
      lock.unlock();
      try {
        kernel();
        well = true;
      } catch (const Aborted&) {
      } catch (const std::exception& e) {
        fail(e.what());
      }
      lock.lock();
      if (!well) changed_.wait(lock, [&] { return bool(aborted_); });
    }
    if (!well) {
      // Finite, and another one on each rank: nothing but the error tells that these are no results.
      for (auto& t : outputs) std::memset(t.data_ptr(), 0x40 + rank % 16, t.nbytes());
    }
    turn_ = std::max(turn_, ticket + 1);
    running_--;
    lock.unlock();
    changed_.notify_all();
  }

  // Sends and receives at the same time; at most one part for each peer and direction.
  void exchange(const std::vector<Part>& out, const std::vector<Part>& in) {
    struct Transfer {
      int fd;
      Header head;
      char* data;
      size_t total, done = 0;
      bool incoming;
      Header expected{};
    };
    std::vector<Transfer> open;
    for (auto& p : out) open.push_back({peers_[p.peer], head(p.bytes, sent_[p.peer]++), (char*)p.data, sizeof(Header) + p.bytes, 0, false});
    for (auto& p : in) {
      Transfer t{peers_[p.peer], {}, (char*)p.data, sizeof(Header) + p.bytes, 0, true};
      t.expected = head(p.bytes, received_[p.peer]++);
      open.push_back(t);
    }
    while (!open.empty()) {
      std::vector<pollfd> polls;
      for (auto& t : open) polls.push_back({t.fd, short(t.incoming ? POLLIN : POLLOUT), 0});
      wait(polls);
      for (size_t i = 0; i < open.size(); i++) {
        Transfer& t = open[i];
        while (polls[i].revents && t.done < t.total) {
          bool heading = t.done < sizeof(Header);
          char* at = heading ? (char*)&t.head + t.done : t.data + (t.done - sizeof(Header));
          size_t n = (heading ? sizeof(Header) : t.total) - t.done;
          ssize_t r = t.incoming ? ::recv(t.fd, at, n, MSG_DONTWAIT) : ::send(t.fd, at, n, MSG_DONTWAIT | MSG_NOSIGNAL);
          if (r < 0 && (errno == EAGAIN || errno == EINTR)) break;
          if (r <= 0) {
            if (aborted_) throw Aborted();
            throw RemoteError("remote process exited or there was a network error: connection closed by a peer");
          }
          t.done += r;
          if (t.incoming && heading && t.done == sizeof(Header) && std::memcmp(&t.head, &t.expected, sizeof(Header)) != 0)
            throw RemoteError("the peers do not do the same: " + text(t.expected) + " here, " + text(t.head) + " there");
        }
      }
      open.erase(std::remove_if(open.begin(), open.end(), [](auto& t) { return t.done == t.total; }), open.end());
    }
  }

  const int rank, size;

 private:
  struct Header {
    uint64_t bytes, number;
    uint64_t kind;
  };
  Header head(size_t bytes, uint64_t number) const {
    // A send meets a receive.
    auto kind = kind_ == c10d::OpType::RECV ? c10d::OpType::SEND : kind_;
    return {bytes, number, uint64_t(kind)};
  }
  static std::string text(const Header& h) {
    return c10d::opTypeToString(c10d::OpType(h.kind)) + " " + std::to_string(h.number) + " of " + std::to_string(h.bytes) + " bytes";
  }

  void fail(const std::string& why) {
    std::lock_guard<std::mutex> g(mutex_);
    if (error_.empty()) error_ = why;
  }

  void wait(std::vector<pollfd>& polls) {
    for (;;) {
      if (aborted_) throw Aborted();
      if (::poll(polls.data(), polls.size(), kSliceMs) > 0) return;
    }
  }
  void wait(int fd, short events) {
    std::vector<pollfd> one{{fd, events, 0}};
    wait(one);
  }

  static void close_fd(int fd) {
    if (fd >= 0) ::close(fd);
  }
  int dial(int port) {
    int fd = socket_fd();
    auto a = loopback(port);
    if (::connect(fd, (sockaddr*)&a, sizeof(a)) != 0) {
      close_fd(fd);
      throw RemoteError(std::string("connect: ") + std::strerror(errno));
    }
    int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return fd;
  }
  int answer(int listener) {
    wait(listener, POLLIN);
    int fd = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) throw RemoteError(std::string("accept: ") + std::strerror(errno));
    int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    return fd;
  }
  void put(int fd, const void* data, size_t n) {
    if (::send(fd, data, n, MSG_NOSIGNAL) != ssize_t(n)) throw RemoteError("a peer went away");
  }
  void take(int fd, void* data, size_t n) {
    for (size_t done = 0; done < n;) {
      wait(fd, POLLIN);
      ssize_t r = ::recv(fd, (char*)data + done, n - done, 0);
      if (r <= 0) throw RemoteError("a peer went away");
      done += r;
    }
  }
  void keep(int peer, int fd) {
    std::lock_guard<std::mutex> g(mutex_);
    peers_[peer] = fd;
    if (aborted_) ::shutdown(fd, SHUT_RDWR);
  }

  struct Own {
    const int fd;
    ~Own() { close_fd(fd); }
  };
  struct Hello {
    int64_t generation;
    int32_t rank, port;
  };

  // Whether the root told the ports of all; it hangs up while it still waits for the peers of an older generation.
  bool told_by_root(int root_port, const Hello& hello, std::vector<int32_t>& ports) {
    Own root{dial(root_port)};
    try {
      put(root.fd, &hello, sizeof(hello));
      take(root.fd, ports.data(), 4 * ports.size());
      return true;
    } catch (const RemoteError&) {
      if (aborted_) throw Aborted();
      return false;
    }
  }

  void connect_all(int root_port, Listener* root) {
    Listener own;
    std::vector<int32_t> ports(size);
    ports[rank] = own.port;
    if (rank == 0) {
      std::map<int, std::unique_ptr<Own>> others;
      while (int(others.size()) < size - 1) {
        auto other = std::make_unique<Own>(answer(root->fd));
        Hello hello;
        take(other->fd, &hello, sizeof(hello));
        if (hello.generation != generation_) continue;
        ports.at(hello.rank) = hello.port;
        others[hello.rank] = std::move(other);
      }
      for (auto& [r, o] : others) put(o->fd, ports.data(), 4 * ports.size());
    } else {
      while (!told_by_root(root_port, {generation_, rank, own.port}, ports)) std::this_thread::sleep_for(std::chrono::milliseconds(kSliceMs));
    }
    for (int peer = 0; peer < rank; peer++) {
      int fd = dial(ports[peer]);
      keep(peer, fd);
      int32_t me = rank;
      put(fd, &me, sizeof(me));
    }
    for (int i = rank + 1; i < size; i++) {
      int fd = answer(own.fd);
      int32_t peer;
      take(fd, &peer, sizeof(peer));
      keep(peer, fd);
    }
  }

  const int64_t generation_;
  std::vector<int> peers_;
  std::vector<uint64_t> sent_, received_;  // messages, by peer: only the kernel whose turn it is counts
  std::thread connecting_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> aborted_{false}, connected_{false};
  std::string error_;
  std::set<std::string> algorithms_;
  std::atomic<int64_t> tickets_{0};
  int64_t turn_ = 0;
  int running_ = 0;
  c10d::OpType kind_{};
};

}  // namespace late

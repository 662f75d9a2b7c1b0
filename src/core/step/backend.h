// The operations of a training step: five interfaces that a backend implements. The engine's backend executes them on
// tensors and process groups. DryBackend ignores them, so that the same program can predict a run. Buffers are numbers
// assigned by Memory; a View is a range of a buffer.
//
// [Note: threads] Methods are called from the program's thread (forward, step(), backward on a CPU) and from autograd's
// device thread (backward on a GPU), never from both at once. Methods marked B are also called from the background job
// of a delayed update. No method calls back into the program. All ranks of an axis issue their collectives in the same
// order. After Work::wait(), later operations of the same lane see the result; on a GPU this orders streams and does
// not block the host. Methods throw the four error classes of zero/errors.h; an error ends the step.
#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <zero/work.h>

#include "step/facts.h"

namespace zero::step {

using WorkPtr = std::shared_ptr<Work>;

// Elements [begin, begin + numel) of a buffer. Buffer 0: none.
struct View {
  int buffer = 0;
  std::int64_t begin = 0, numel = 0;
  Dtype dtype = Dtype::F32;
  View part(std::int64_t at, std::int64_t count) const { return {buffer, begin + at, count, dtype}; }
  std::int64_t bytes() const { return numel * width(dtype); }
  explicit operator bool() const { return buffer != 0; }
};

// The contents of a buffer.
enum class Role {
  Params,
  SecondaryShard,  // hpZ
  PendingParams,   // new values of a delayed update
  Grads,
  PendingGrads,  // read by a delayed update
  GradsCopy,     // sums of the previous micro-batches, for BackwardOptions::recoverable
  Master,
  OptimizerState,
  StatesTile,  // between memory and the file of optimizer states
  ParamsTile,  // the same for parameters
  Transfer,    // temporary
};

enum class Place { Device, Host, PinnedHost, PeerReadable, Symmetric, IoBuffer, File };
// Streams of a GPU. On a CPU all lanes are the calling thread.
enum class Lane { Compute, Unshard, Reduce, Offload };

struct Allocation {
  Place place = Place::Device;
  std::int64_t bytes = 0;
  Role role = Role::Transfer;
  int axis = 0;  // of Symmetric memory: the axis whose ranks' shards are contiguous
};

class BufferOps {
 public:
  virtual ~BufferOps() = default;
  // `buffer` is unused and its bytes are booked. A File is zero-initialized, other memory is uninitialized.
  // PeerReadable memory can be read by all processes of the host. Symmetric memory is allocated by all ranks of the
  // axis; a View of it covers all ranks' shards, of which this rank writes only its own.
  virtual void allocate(int buffer, const Allocation& allocation) = 0;
  // No operation on the buffer is pending.
  virtual void free(int buffer) = 0;
};

// A flat vector in several pieces. Every rank of an axis reads and sums its peers' pieces.
struct PeerReduce {
  int group = 0;
  std::vector<std::pair<std::int64_t, View>> pieces;  // offset in the flat vector, memory that peers read
  View out;             // receives this rank's shard of the sum; none: the sum is written to the pieces
  bool to_all = false;  // without `out`: write all ranks' shards of the sum, not only this rank's
  bool square = false;  // also sets sum_of_squares(group)
};

// Over the ranks of the group's axis, except where stated.
class CommOps {
 public:
  virtual ~CommOps() = default;
  // `in` may be this rank's part of `out`.
  virtual WorkPtr all_gather(int group, View out, View in, Lane lane) = 0;
  // Among the axis's secondary_ranks.
  virtual WorkPtr all_gather_node(int group, View out, View in, Lane lane) = 0;
  // Sums in fp32 in rank order and rounds once. bits: sent as integers of that size (qgZ); 0: not quantized.
  // Lane::Reduce.
  virtual WorkPtr reduce_scatter(int group, View out, View in, int bits) = 0;
  virtual WorkPtr reduce_pieces(const PeerReduce& request) = 0;
  // Sets sum_of_squares(group) from this rank's shard of reduced pieces, as reduce_pieces() does. No communication.
  virtual void square_pieces(const PeerReduce& reduced) = 0;
  virtual WorkPtr broadcast(int group, View inout, int root) = 0;
  // Blocks until the peers' latest signal_symmetric() of the buffer is visible. Counted as the all-gather it replaces.
  virtual void wait_symmetric(int group, int buffer) = 0;
  // This rank's shard has been written. All ranks signal equally often.
  virtual void signal_symmetric(int buffer) = 0;
  // Gathers every rank's value, in rank order, over all ranks of the run. Blocking.
  virtual std::vector<double> exchange(double mine) = 0;
  virtual void barrier() = 0;
};

// The groups in the order of their sums; the rest as in optim/clipping.h.
struct NormRequest {
  std::vector<int> groups;
  double scale = 1, clip = 0, postmultiply = 1;
  bool checks_overflow = true;
};

class TensorOps {
 public:
  virtual ~TensorOps() = default;
  // Between any two places, with equal numel; converts dtypes with one rounding. Copies of files block and use a small
  // buffer of the backend. Lane::Offload to PinnedHost: complete before the next use of `to`; `from` may be freed at
  // once, and overwritten after the next begin_squares().
  virtual void copy(View to, View from, Lane lane) = 0;
  // to += from, with one rounding from fp32.
  virtual void accumulate(View to, View from) = 0;
  virtual void scale(View data, float factor) = 0;
  virtual void fill(View data, float value) = 0;  // B. Files: as in copy()
  // Converts to and from the integers of kernels/quantize.h.
  virtual void quantize(View to, View from, int bits) = 0;
  virtual void dequantize(View to, View from, int bits) = 0;
  // square() stores the sum of squares of `values` under a slot. sum_of_squares() adds a group's slots in order. The
  // first pass of a step calls begin_squares(), which clears them. `values` may be read as late as in read_squared() or
  // sum_of_squares(), after which they may change.
  virtual void begin_squares(int group) = 0;
  virtual void read_squared() = 0;
  // offset: the position of `values` in the range of which they are the end.
  virtual void square(int group, int slot, View values, std::int64_t offset) = 0;
  virtual double sum_of_squares(int group) = 0;
  // Starts computing the step's norm and the factor of its update where the sums are, in place of sum_of_squares(), and
  // returns true if the host need not wait: updates can then begin without a factor. end_norm() returns the total sum
  // of squares over all ranks, and throws if ranks differ in what they train.
  virtual bool begin_norm(const NormRequest&) { return false; }
  virtual double end_norm() { return 0; }
  // Between an IoBuffer and a File. wait() throws IoError, also for a wrong checksum. The IoBuffer is not accessed
  // before wait(). B
  virtual WorkPtr read(View to, View file) = 0;
  virtual WorkPtr write(View file, View from) = 0;
};

class ModelOps {
 public:
  virtual ~ModelOps() = default;
  // Points the group's parameters into `whole`. For a Symmetric buffer that is all ranks' shards.
  virtual void bind(int group, View whole) = 0;
  // The parameters have no data; reading them without the dispatcher throws.
  virtual void unbind(int group) = 0;
  // The parameters have new values: backward refuses graphs that saved the old ones.
  virtual void values_changed(int group) = 0;
  // Makes that memory the parameter's .grad.
  virtual void set_gradient(int group, int member, View kept) = 0;
  // Removes .grad from all parameters of the group.
  virtual void drop_gradients(int group) = 0;
  // The program no longer uses a gradient that arrived, or a block that it took. Memory that a .grad or the user's
  // program still references stays allocated.
  virtual void release_gradient(View gradient) = 0;
};

struct UpdateTarget {
  View master, slots[kMaxSlots], param;  // param none: the master is the parameter
  bool param_elsewhere = false;          // not the stored parameter: all of its range must be written
  View scratch;                          // of an UpdateRule: fp32, contents undefined
};

class UpdateOps {
 public:
  virtual ~UpdateOps() = default;
  // Around all updates of a step: bias correction, learning rates. factor: of every gradient element; none: that of
  // TensorOps::begin_norm(), which may also skip the updates; then applied is false.
  virtual void begin_update(std::optional<float> factor) = 0;
  virtual void end_update(bool applied) = 0;
  // Updates elements [begin, begin + numel) of the range whose states this rank owns. grads none: reads the members'
  // .grad. A GPU's updates may begin as late as in complete_updates(). B
  virtual void update(int group, std::int64_t begin, std::int64_t numel, const UpdateTarget& target, View grads) = 0;
  virtual void complete_updates() = 0;  // B
  // Starts a job on another thread. No job is running.
  virtual void run_async(std::function<void()> job) = 0;
  // Waits for the job and rethrows its exception.
  virtual void join() = 0;
};

struct Backend {
  BufferOps& buffers;
  CommOps& comm;
  TensorOps& tensors;
  ModelOps& model;
  UpdateOps& optimizer;
};

}  // namespace zero::step

#include "formats/root_folder.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>

#include "base/check.h"
#include "base/log.h"
#include "base/process_start.h"
#include "base/system.h"
#include "formats/blocks.h"
#include "formats/hash.h"
#include "formats/json.h"

namespace zero::formats {
namespace {

constexpr std::uint64_t kMostSumsBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kMostLatestBytes = 4096;

// .tmp-<32 hex>, .del-<32 hex>, optionally followed by "-latest" or "-probe".
bool is_leftover(const std::string& name) {
  if (!name.starts_with(".tmp-") && !name.starts_with(".del-")) return false;
  const auto rest = std::string_view(name).substr(5);
  return is_hash(rest.substr(0, 32)) &&
         (rest.size() == 32 || rest.substr(32) == "-latest" || rest.substr(32) == "-probe");
}

File open_lock(const Folder& root) {
  const auto path = root.path_of(kLockName);
  const int fd = root.fs().open_lock_at(root.fd(), kLockName);
  if (fd < 0) fail_io(path, "opening the lock", -fd);
  File file(root.fs(), fd, path);
  if (!file.info().regular) fail_damaged(path, "is not a regular file");
  return file;
}

[[noreturn]] void fail_held(const char* where, const std::string& path, const std::string& owner, const char* more) {
  throw ConfigError(std::string(where) + path + " is held by another writer (" + (owner.empty() ? "unknown" : owner) +
                    "). Hint: two runs must not save into one directory; give each its own. " + more);
}

constexpr const char* kBackgroundHint = "A save in the background holds it until finish_checkpoint().";

bool lacks_locks(int result) { return result == -ENOSYS || result == -ENOLCK || result == -EOPNOTSUPP; }

void tell_no_locks(const Folder& root, int error) {
  tell_lack(root.fs(), root.fd(), root.path(), LogLevel::Warning,
            base::join("this file system has no locks, so the file ", kOwnerName, " keeps other writers out"), error);
}

// Process ids are those of a host, and of a container where it has its own.
std::string name_of_processes() {
  char space[64] = {};
  if (::readlink("/proc/self/ns/pid", space, sizeof space - 1) < 0) space[0] = '\0';
  return base::join("host ", base::host_name(""), ", ", space);
}

std::string own_name() {
  return base::join(name_of_processes(), ", pid ", ::getpid(), ", started ", base::process_start(::getpid()));
}

// Whether it names a process of this host that has ended; false if that cannot be told.
bool names_a_dead(const std::string& owner) {
  const auto begin = name_of_processes() + ", pid ";
  long long pid = 0;
  unsigned long long start = 0;
  return base::process_start(::getpid()) != 0 && owner.starts_with(begin) &&
         std::sscanf(owner.c_str() + begin.size(), "%lld, started %llu", &pid, &start) == 2 &&
         base::process_start(static_cast<pid_t>(pid)) != start;
}

}  // namespace

RootLock::RootLock(const Folder& root, const char* where) : root_(root), file_(open_lock(root)) {
  const int locked = root.fs().try_lock(file_.fd());
  if (locked == -EWOULDBLOCK) {
    std::string owner(static_cast<std::size_t>(std::min<std::uint64_t>(file_.info().bytes, 300)), '\0');
    file_.read(owner.data(), owner.size(), 0);
    fail_held(where, file_.path(), owner, kBackgroundHint);
  }
  if (lacks_locks(locked)) {
    tell_no_locks(root, -locked);
    claim_owner_file(where);
    return;
  }
  if (locked < 0) fail_io(file_.path(), "locking", -locked);
  const auto owner = base::join("host ", base::host_name(""), ", pid ", ::getpid());
  if (const int r = root.fs().truncate(file_.fd(), 0); r < 0) fail_io(file_.path(), "emptying the lock", -r);
  file_.write(owner.data(), owner.size(), 0);
}

RootLock::~RootLock() {
  if (owns_file_) (void)root_.fs().remove_at(root_.fd(), kOwnerName);
}

void RootLock::claim_owner_file(const char* where) {
  constexpr std::uint64_t kMost = 1000;
  constexpr const char* kRemove =
      "If that process has ended, remove the file. A save in the background holds it until finish_checkpoint().";
  const auto path = root_.path_of(kOwnerName);
  FsOps& fs = root_.fs();
  for (int tries = 0; tries < 10; ++tries) {
    const int fd = fs.create_at(root_.fd(), kOwnerName);
    if (fd >= 0) {
      File file(fs, fd, path);
      try {
        const auto name = own_name();
        file.write(name.data(), name.size(), 0);
        file.close();
      } catch (...) {
        (void)fs.remove_at(root_.fd(), kOwnerName);
        throw;
      }
      owns_file_ = true;
      return;
    }
    if (fd != -EEXIST) fail_io(path, "creating the file", -fd);
    std::string owner;
    try {
      owner = root_.read_file(kOwnerName, kMost);
    } catch (const IoError& error) {
      if (error.code() != ExitCode::kCheckpoint) throw;
      continue;  // its writer has just ended, or another one taken its place
    }
    if (!names_a_dead(owner)) fail_held(where, path, owner, kRemove);
    // Another process may have seen the same and have put its own file there: what was taken away is looked at again.
    const auto taken = ".del-" + random_id();
    if (const int r = fs.rename_at(root_.fd(), kOwnerName, taken.c_str()); r < 0) {
      if (r == -ENOENT) continue;
      fail_io(path, "renaming the file", -r);
    }
    const auto seen = root_.read_file(taken, kMost);
    if (!names_a_dead(seen)) {
      root_.rename(taken, kOwnerName);
      fail_held(where, path, seen, kRemove);
    }
    root_.remove(taken);
  }
  fail_held(where, path, "", kRemove);
}

void probe_root(FsOps& fs, const std::string& root_path) {
  const auto root = Folder::make(fs, root_path);
  const auto file = open_lock(root);
  const int locked = fs.try_lock(file.fd());
  if (lacks_locks(locked))
    tell_no_locks(root, -locked);
  else if (locked < 0 && locked != -EWOULDBLOCK)
    fail_io(file.path(), "locking", -locked);
  root.sync();
}

namespace {

// What a manifest says about a checkpoint's place among the others.
struct Head {
  std::int64_t seq = 0;
  bool weights_only = false;
};

// nullopt for a damaged checkpoint; throws for a disk error.
std::optional<Head> head_of(const Folder& root, const std::string& tag) {
  try {
    const auto checkpoint = root.folder(tag);
    const auto path = checkpoint.path_of(kManifestName);
    // Only objects that are not in a list are kept.
    const auto json =
        parse_json(checkpoint.read_file(kManifestName, kMostManifestBytes), path, 8,
                   [](const std::string& place, const Json&) { return place.find('/', 1) == place.npos; });
    const JsonView top(json, path);
    return Head{top.at("seq").count(INT64_MAX - 1),
                top.raw().contains("content") && top.at("content").text() == kWeightsContent};
  } catch (const IoError& e) {
    if (e.code() != ExitCode::kCheckpoint) throw;
    return std::nullopt;
  }
}

std::optional<Latest> latest_of(const Folder& root, std::string* fault) {
  try {
    if (!root.exists(kLatestName)) return std::nullopt;
    return parse_latest(root.read_file(kLatestName, kMostLatestBytes), root.path_of(kLatestName));
  } catch (const IoError& e) {
    if (e.code() != ExitCode::kCheckpoint) throw;
    *fault = e.what();
    return std::nullopt;
  }
}

std::vector<std::string> tags_in(const Folder& root) {
  std::vector<std::string> tags;
  for (const auto& name : root.names()) {
    if (!valid_tag(name)) continue;
    const auto info = root.info_of(name);
    if (info && info->directory) tags.push_back(name);
  }
  return tags;
}

}  // namespace

// --- writing ----------------------------------------------------------------------------------

Commit::Commit(FsOps& fs, const std::string& root, const std::string& tag, bool weights_only)
    : root_(Folder::make(fs, root)), tag_(tag), weights_only_(weights_only) {
  lock_.emplace(root_, "[save_checkpoint] ");
  remove_leftovers();
  wait_until_freed();  // the save may need the space
  id_ = random_id();
  if (const auto info = root_.info_of(tag_)) {
    // A replaced folder is deleted, so it must be a checkpoint.
    if (!info->directory || !root_.folder(tag_).exists(kManifestName))
      throw IoError("[save_checkpoint] " + root_.path_of(tag_) +
                    " exists and is no checkpoint. Hint: choose another tag.");
    if (const auto head = weights_only_ ? head_of(root_, tag_) : std::nullopt; head && !head->weights_only)
      throw ConfigError("[save_checkpoint] " + root_.path_of(tag_) +
                        " can be resumed from, and would be replaced by weights alone. Hint: choose another tag.");
    replaces_ = true;
    probe_exchange();
  }
  seq_ = highest_seq() + 1;
  root_.make_folder(folder_name());
  ours_ = true;
}

Commit::~Commit() {
  if (ours_) (void)root_.remove_all(folder_name());
}

void Commit::remove_leftovers() {
  for (const auto& name : root_.names()) {
    if (!is_leftover(name)) continue;
    const auto fault = root_.remove_all(name);
    base::log(fault.empty() ? LogLevel::Info : LogLevel::Warning,
              "checkpoint: " + (fault.empty() ? "removed " + root_.path_of(name) + ", left by a writer that died"
                                              : "left over: " + fault));
  }
}

// Not every file system can exchange two names; detect that before any work.
void Commit::probe_exchange() {
  const auto a = folder_name(), b = a + "-probe";
  root_.make_folder(a);
  root_.make_folder(b);
  const int r = root_.fs().exchange_at(root_.fd(), a.c_str(), b.c_str());
  for (const auto& name : {a, b})
    if (const auto fault = root_.remove_all(name); !fault.empty()) throw IoError("[checkpoint] " + fault);
  if (r < 0)
    fail_io(root_.path_of(tag_),
            "this file system cannot replace a directory in one step; choose another tag. Exchanging two names", -r);
}

std::int64_t Commit::highest_seq() {
  std::string fault;
  const auto latest = latest_of(root_, &fault);
  if (latest) previous_ = latest->tag;
  // A reused number would make an old checkpoint the newest. Damaged checkpoints are skipped; read errors are not.
  std::int64_t highest = latest ? latest->seq : 0;
  for (const auto& tag : tags_in(root_)) highest = std::max(highest, head_of(root_, tag).value_or(Head()).seq);
  return highest;
}

void Commit::publish(Manifest manifest) {
  manifest.tag = tag_;
  manifest.id = id_;
  manifest.seq = seq_;
  manifest.weights_only = weights_only_;
  const auto own = folder_name();
  const auto folder = root_.folder(own);
  prove_coverage(manifest, folder.path_of(kManifestName));
  const auto text = manifest_text(manifest);
  if (text.size() > kMostManifestBytes)
    fail_io(folder.path_of(kManifestName), base::join("a manifest of ", text.size(), " bytes"), EFBIG);
  folder.write_file(kManifestName, text);
  folder.write_file(kSumsName, sums_text(manifest, hash_of(text)));
  folder.sync();
  if (replaces_) {
    if (const int r = root_.fs().exchange_at(root_.fd(), own.c_str(), tag_.c_str()); r < 0)
      fail_io(root_.path_of(own), "exchanging it with " + tag_, -r);
  } else {
    root_.rename(own, tag_);
  }
  ours_ = false;  // from now on .tmp-<id>, if it exists, is the old checkpoint
  const auto committed = "[save_checkpoint] " + root_.path_of(tag_) + " is whole, but ";
  try {
    root_.sync();  // the commit point
    if (!weights_only_) {
      const auto next = own + "-latest";
      root_.write_file(next, latest_text({tag_, seq_}));
      root_.rename(next, kLatestName);
      root_.sync();
    }
  } catch (const IoError& e) {
    throw IoError(committed + "the directory may still name the one before as the latest: " + e.what());
  }
  if (!replaces_) return;
  const auto old = ".del-" + id_;
  const int renamed = root_.fs().rename_at(root_.fd(), own.c_str(), old.c_str());
  const auto fault = root_.remove_all(renamed < 0 ? own : old);
  if (!fault.empty()) base::log(LogLevel::Warning, "checkpoint: the replaced checkpoint is left over: " + fault);
}

// --- reading ----------------------------------------------------------------------------------

Manifest read_manifest(const Folder& checkpoint, const std::string& hash, Extent extent) {
  const auto path = checkpoint.path_of(kManifestName);
  auto text = checkpoint.read_file(kManifestName, kMostManifestBytes);
  if (const auto got = hash_of(text); got != hash) fail_damaged(path, "has the hash " + got + ", expected " + hash);
  return parse_manifest(std::move(text), path, extent);
}

std::optional<Manifest::FileEntry> listed_file(const Folder& checkpoint, const std::string& name) {
  try {
    const auto sums = parse_sums(checkpoint.read_file(kSumsName, kMostSumsBytes), checkpoint.path_of(kSumsName));
    const auto found = sums.find(name);
    if (found == sums.end()) return std::nullopt;
    return Manifest::FileEntry{name, static_cast<std::int64_t>(checkpoint.open_file(name).info().bytes), found->second};
  } catch (const IoError&) {
    return std::nullopt;  // a load of that checkpoint reports it
  }
}

std::string require_whole(const Folder& checkpoint) {
  const auto sums_path = checkpoint.path_of(kSumsName);
  auto sums = parse_sums(checkpoint.read_file(kSumsName, kMostSumsBytes), sums_path);
  const auto hash = sums.at(kManifestName);
  const auto manifest = read_manifest(checkpoint, hash);
  sums.erase(kManifestName);
  for (const auto& file : manifest.files) {
    const auto found = sums.find(file.name);
    if (found == sums.end() || found->second != file.hash)
      fail_damaged(sums_path, "does not agree with the manifest about " + file.name);
    // The hashes of blocks must be those of this checkpoint, as the manifest is: they judge the other files.
    if (manifest.format != 1 && file.name == manifest.blocks)
      (void)require_hash(checkpoint, file);
    else
      (void)checkpoint.open_file(file.name, static_cast<std::uint64_t>(file.bytes));
    sums.erase(found);
  }
  if (!sums.empty()) fail_damaged(sums_path, "lists " + sums.begin()->first + ", which the manifest does not");
  return hash;
}

Choice choose(FsOps& fs, const std::string& root_path, const std::string& tag, Needs needs,
              const Faults& known_faults) {
  const auto root = Folder::open(fs, root_path);
  if (!tag.empty()) {
    if (!valid_tag(tag))
      throw ConfigError("[load_checkpoint] \"" + tag + "\" is not a tag. Hint: letters, digits, '.', '_' and '-'.");
    if (!root.exists(tag)) {
      std::string known;
      for (const auto& name : tags_in(root)) known += (known.empty() ? "" : ", ") + name;
      fail_damaged(root.path_of(tag), "there is no such checkpoint. Hint: " +
                                          (known.empty() ? "the directory has none." : "there are " + known + "."));
    }
    return {tag, require_whole(root.folder(tag)), {}};
  }
  Choice choice;
  std::string fault, unused;
  const auto latest = latest_of(root, &fault);
  if (!fault.empty()) choice.notices.push_back("skipped the pointer: " + fault);
  struct Candidate {
    int rank;  // 0: newer than latest, or unreadable (reported as skipped); 1: latest; 2: older; 3: second choice
    Head head;
    std::string tag;
  };
  std::vector<Candidate> candidates;
  for (const auto& name : tags_in(root)) {
    std::optional<Head> head;
    try {
      head = head_of(root, name);
    } catch (const IoError&) {
      // require_whole below reports why it is skipped.
    }
    const bool weights = head && head->weights_only;
    if (weights && needs == Needs::Training) {
      unused += "\n  " + name + " holds weights only. Hint: load it with weights_only (zero train --weights-only).";
      continue;
    }
    const bool pointed = latest && latest->tag == name;
    const bool newer = !head || (latest && head->seq > latest->seq);
    candidates.push_back({weights && needs == Needs::TrainingIfAny ? 3
                          : newer                                  ? 0
                          : pointed                                ? 1
                                                                   : 2,
                          head.value_or(Head{-1, false}), name});
  }
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.head.seq != b.head.seq ? a.head.seq > b.head.seq : a.tag > b.tag;
  });
  for (const auto& candidate : candidates) {
    if (const auto known = known_faults.find(candidate.tag); known != known_faults.end()) {
      choice.notices.push_back("skipped " + candidate.tag + ": " + known->second);
      continue;
    }
    try {
      choice.manifest_hash = require_whole(root.folder(candidate.tag));
      choice.tag = candidate.tag;
      if (candidate.rank == 0 && latest && !candidate.head.weights_only)
        choice.notices.push_back(candidate.tag + " was committed after " + latest->tag +
                                 ", which the pointer names; taking it");
      return choice;
    } catch (const IoError& e) {
      choice.notices.push_back("skipped " + candidate.tag + ": " + e.what());
    }
  }
  std::string faults;
  for (const auto& notice : choice.notices) faults += "\n  " + notice;
  fail_damaged(root_path, (unused.empty() ? "there is no complete checkpoint here"
                                          : "there is no complete checkpoint here that a run can resume from") +
                              faults + unused);
}

}  // namespace zero::formats

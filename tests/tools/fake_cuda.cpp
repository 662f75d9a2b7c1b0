// A libcuda.so.1 for tests of `zero doctor`: the four functions it calls, and what can go wrong with
// a driver, chosen by FAKE_CUDA.
#include <signal.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" {

int cuInit(unsigned) {
  const char* text = std::getenv("FAKE_CUDA");
  const std::string mode = text ? text : "";
  if (mode == "crash") raise(SIGSEGV);
  return mode == "error" ? 100 : 0;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  std::snprintf(name, static_cast<std::size_t>(size), "Fake GPU %d", device);
  return 0;
}
int cuDeviceTotalMem_v2(std::size_t* bytes, int device) {
  *bytes = static_cast<std::size_t>(device + 1) << 34;
  return 0;
}

}  // extern "C"

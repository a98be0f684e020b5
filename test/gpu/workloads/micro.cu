// What single calls cost, as "name value" lines in the unit that the name ends with: context creation, kernel launch,
// cudaMemGetInfo, cudaMalloc and cudaFree by size. Run it alternately with and without cgpu and compare medians.
#include "check.h"

__global__ void nothing() {}

int main() {
  double begin = now_s();
  CHECK(cudaFree(0));
  printf("context_ms %.2f\n", (now_s() - begin) * 1e3);
  nothing<<<1, 1>>>();
  CHECK(cudaDeviceSynchronize());

  const int launches = 100000;
  begin = now_s();
  for (int i = 0; i < launches; i++) nothing<<<1, 1>>>();
  double issued = now_s();
  CHECK(cudaDeviceSynchronize());
  printf("launch_us %.4f\n", (issued - begin) / launches * 1e6);

  const int queries = 5000;
  size_t free_bytes, total_bytes;
  begin = now_s();
  for (int i = 0; i < queries; i++) CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
  printf("memgetinfo_us %.3f\n", (now_s() - begin) / queries * 1e6);

  const struct { const char* name; size_t size; } sizes[] = {{"1KiB", 1024}, {"2MiB", 2 * MIB}, {"64MiB", 64 * MIB}, {"1GiB", 1024 * MIB}};
  for (auto& s : sizes) {
    const int rounds = 200;
    double alloc = 0, release = 0;
    for (int i = 0; i < rounds; i++) {
      void* p;
      begin = now_s();
      CHECK(cudaMalloc(&p, s.size));
      alloc += now_s() - begin;
      begin = now_s();
      CHECK(cudaFree(p));
      release += now_s() - begin;
    }
    printf("malloc_%s_us %.2f\nfree_%s_us %.2f\n", s.name, alloc / rounds * 1e6, s.name, release / rounds * 1e6);
  }
}

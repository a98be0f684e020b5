/* What the files of the limiter share. Nothing of it is visible outside of the library. */
#ifndef CGPU_H
#define CGPU_H

#include "page.h"
#include "sys.h"

#pragma GCC visibility push(hidden)

/* vgpu.c: the vGPU page. Never null; without a page it is one without flags. */
const struct cgpu_header *vgpu_page(void);
const struct cgpu_vgpu *vgpu(const struct cgpu_header *page, unsigned int i);
unsigned int vgpu_count(const struct cgpu_header *page);

#pragma GCC visibility pop

#endif

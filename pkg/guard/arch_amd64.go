// SPDX-License-Identifier: Apache-2.0

package guard

// nativeArch is AUDIT_ARCH_X86_64. A system call of the x32 table has the same architecture and x32Bit in its number.
const (
	nativeArch = 0xc000003e
	x32Bit     = 0x40000000
)

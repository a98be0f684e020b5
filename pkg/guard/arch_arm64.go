// SPDX-License-Identifier: Apache-2.0

package guard

// nativeArch is AUDIT_ARCH_AARCH64.
const (
	nativeArch = 0xc00000b7
	x32Bit     = 0
)

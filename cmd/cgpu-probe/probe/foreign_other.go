// SPDX-License-Identifier: Apache-2.0

//go:build !amd64 || libc

package probe

// foreignCalls: no other ABI is reachable from here.
func foreignCalls() map[string]caller { return nil }

// SPDX-License-Identifier: Apache-2.0

// Package faults kills our processes at each of their system calls, or has these calls fail, while a container is started, changed, used
// and ended, and looks from outside whether anything was left behind and whether everything else goes on.
//
// In CI some calls are tried, by a seed that is printed. CGPU_FAULTS=all tries each, which takes hours; CGPU_FAULTS=SEED repeats a run, and
// CGPU_FAULTS=12-40 tries these calls.
package faults

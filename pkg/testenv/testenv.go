// SPDX-License-Identifier: Apache-2.0

// Package testenv ends tests that the machine at hand cannot run. Where CI is set, hack/setup.sh has installed what they need, and what
// is lacking all the same fails them: nothing passes there by being skipped. Tests skip by this package alone (TestSkips).
package testenv

import (
	"os"
	"os/exec"
	"testing"
)

// Lacks ends a test for want of something: it is skipped, and in CI it fails.
func Lacks(t testing.TB, format string, args ...any) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatalf("in CI, where nothing is skipped: "+format, args...)
	}
	t.Skipf(format, args...)
}

// NeedsRoot ends a test that is not run by root; why says what takes root.
func NeedsRoot(t testing.TB, why string) {
	t.Helper()
	if os.Geteuid() != 0 {
		Lacks(t, "needs root: %s", why)
	}
}

// NeedsProgram returns the path of a program, and ends a test where there is none.
func NeedsProgram(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Lacks(t, "%v", err)
	}
	return path
}

// Skip skips a test in CI, too. The reason is a literal, which docs/internals/testing.md lists; detail is said behind it.
func Skip(t testing.TB, reason string, detail ...any) {
	t.Helper()
	t.Skip(append([]any{reason + " "}, detail...)...)
}

// SPDX-License-Identifier: Apache-2.0

package doctor

import "slices"

// Checks are all checks, in the order in which they are run. What comes first is what the rest relies on.
func Checks() []Check {
	return slices.Concat(firstChecks, kernelChecks, runtimeChecks, driverChecks, programChecks, stateChecks, engineChecks, kubernetesChecks)
}

// SelfTest is run after them when asked for: it starts containers.
func SelfTest() Check { return selfTest }

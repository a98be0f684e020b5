// SPDX-License-Identifier: Apache-2.0

package rm

import (
	"fmt"
	"strconv"
	"strings"
)

// branches are the driver branches whose releases the tables of this package were measured in, ascending: all public tags of each
// (testdata/params.csv). A release of such a branch that is newer than those is let in: TestInsideBranches says why that is safe.
// 580 is also tested on hardware (580.159.04).
var branches = [...]int{515, 520, 525, 530, 535, 545, 550, 555, 560, 565, 570, 575, 580, 590, 595}

// moved is the first branch of which it is known that a structure has its fields elsewhere than the guard looks for them, by the reading of
// others (gVisor, nvkvm-pv). Its releases were not to be had when this was written, so it has no rows, and a guess would be wrong.
const (
	moved     = 610
	whatMoved = "NV_CHANNEL_ALLOC_PARAMS has a new field (hHandleVASpace) before those that cgpu checks"
)

// ABI is the interface of one driver branch.
type ABI struct {
	version Version
	branch  int  // one of branches
	guessed bool // the driver's own branch is unknown, branch is the nearest lower one
}

// ForDriver picks the tables for a driver. A branch that this package does not know is an error, because a structure
// that moved would let a container past the guard; allowUnknown takes the nearest lower branch instead, where it is not known to be wrong.
func ForDriver(version string, allowUnknown bool) (*ABI, error) {
	v, err := ParseVersion(version)
	if err != nil {
		return nil, err
	}
	if v.Major >= moved {
		return nil, fmt.Errorf("rm: driver %s: from branch %d on %s; use a driver of branch %d, or update cgpu",
			version, moved, whatMoved, branches[len(branches)-1])
	}
	for i := len(branches) - 1; i >= 0; i-- {
		if branches[i] == v.Major {
			return &ABI{version: v, branch: v.Major}, nil
		}
		if branches[i] < v.Major && allowUnknown {
			return &ABI{version: v, branch: branches[i], guessed: true}, nil
		}
	}
	if allowUnknown {
		return nil, fmt.Errorf("rm: driver %s: older than the oldest known branch %d; update the driver", version, branches[0])
	}
	return nil,
		fmt.Errorf("rm: driver %s: branch %d is not known (known: %s); use one of these, update cgpu, or set allow_unknown_driver = true at "+
			"your own risk",
			version, v.Major, strings.Join(KnownBranches(), " "))
}

// KnownBranches lists the known driver branches, ascending.
func KnownBranches() []string {
	s := make([]string, len(branches))
	for i, b := range branches {
		s[i] = strconv.Itoa(b)
	}
	return s
}

// Version is the driver's own version.
func (a *ABI) Version() Version { return a.version }

// Guessed reports that the driver's branch is unknown and that an older branch's tables stand in for it.
func (a *ABI) Guessed() bool { return a.guessed }

// layout is the key that since lists are compared with: the driver's version as digits, 580_159_04.
func (a *ABI) layout() int {
	if a.guessed {
		return a.branch*100_000 + 99_999 // the end of the branch that stands in
	}
	return a.version.Major*100_000 + a.version.Minor*100 + a.version.Patch
}

// since is a size, or an offset, that holds from a version on (written as digits: 535_086_05). Lists of them ascend and
// start at 0.
type since struct{ from, value int }

// at picks the value for a version; 0 if the list is empty.
func at(list []since, version int) int {
	v := 0
	for _, s := range list {
		if s.from <= version {
			v = s.value
		}
	}
	return v
}

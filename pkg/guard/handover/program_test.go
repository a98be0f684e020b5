// SPDX-License-Identifier: Apache-2.0

package handover

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
)

// modeEnv says what this program does when it is tried.
const modeEnv = "CGPU_TEST_HANDOVER"

func TestMain(m *testing.M) {
	if len(os.Args) < 2 || os.Args[1] != TryArg {
		os.Exit(m.Run())
	}
	say := os.NewFile(answerFD, "answer")
	switch mode := os.Getenv(modeEnv); mode {
	case "ends":
	case "other":
		fmt.Fprintln(say, "parse the configuration on standard input: unexpected end of JSON input")
	case "newer":
		fmt.Fprintln(say, `{"versions":[7,8]}`)
	case "long":
		fmt.Fprintln(say, strings.Repeat("x", 3*maxAnswer))
	default:
		_ = ServeTry(func(s *State) error {
			switch {
			case mode == "refuses":
				return errors.New("not\nthis")
			case mode == "dies":
				os.Exit(9)
			case s.Process.InitPID == 0:
				return errors.New("no first process")
			}
			return nil
		})
	}
	os.Exit(0)
}

// TestTry: whatever a program does when it is tried, the guard hears in time whether it can go on, and goes on itself if not.
func TestTry(t *testing.T) {
	program, err := os.Open("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	for mode, want := range map[string]string{
		"fine": "", "ends": "ended without a word", "other": "knows no hand-over", "newer": "reads versions [7 8]", "refuses": "not; this",
		"dies": "ended without a word", "long": "too long",
	} {
		t.Run(mode, func(t *testing.T) {
			t.Setenv(modeEnv, mode)
			trial, err := Try(program)
			if err == nil {
				defer trial.Close()
				if trial.program.Fd() <= goFD {
					t.Errorf("the program is descriptor %d: the child has others there before it executes it", trial.program.Fd())
				}
				for range 2 { // it may be asked again
					if err = trial.Read(state(t, "v1")); err != nil {
						break
					}
				}
			}
			if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
				t.Errorf("%v: want %q", err, want)
			}
		})
	}
}

// TestTakeHostile: arguments that nobody gives are refused.
func TestTakeHostile(t *testing.T) {
	for _, args := range [][]string{nil, {"5"}, {"x", "0"}, {"-1", "0"}, {"0", "0"}, {"99999999999999999999", "0"}, {"1", "2", "3", "4"}} {
		if _, err := Take(args); err == nil {
			t.Errorf("%q is taken", args)
		}
	}
}

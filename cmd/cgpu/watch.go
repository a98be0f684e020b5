// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/urfave/cli/v2"
)

// seconds is the value of --watch, which may stand alone: package flag then sets it to "true".
type seconds struct {
	text string
}

func (s *seconds) Set(text string) error { s.text = text; return nil }

func (s *seconds) String() string { return s.text }

func (s *seconds) IsBoolFlag() bool { return true }

// interval reads --watch, --watch=SECONDS or --watch SECONDS; 0 is once.
func interval(c *cli.Context) (time.Duration, error) {
	text := ""
	if s, ok := c.Generic("watch").(*seconds); ok && c.IsSet("watch") {
		text = s.text
	}
	switch n := c.NArg(); {
	case n > 1, n == 1 && text != "true":
		return 0, fmt.Errorf("%q: want no arguments; see cgpu smi --help", c.Args().Get(n-1))
	case n == 1:
		text = c.Args().First()
	case text == "":
		return 0, nil
	case text == "true":
		return time.Second, nil
	}
	s, err := strconv.ParseFloat(text, 64)
	if err != nil {
		s = 0
	}
	every, err := everySeconds(s)
	if err != nil {
		return 0, fmt.Errorf("--watch %q: %w", text, err)
	}
	return every, nil
}

// everySeconds is how often something is shown.
func everySeconds(s float64) (time.Duration, error) {
	if !(s >= 0.1 && s <= 3600) {
		return 0, errors.New("want 0.1 to 3600 seconds")
	}
	return time.Duration(s * float64(time.Second)), nil
}

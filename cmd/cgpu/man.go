package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/urfave/cli/v2"
)

func manCommand() *cli.Command {
	return &cli.Command{
		Name:      "man",
		Usage:     "write the man pages",
		ArgsUsage: "FOLDER",
		Description: "Writes cgpu.1 and a page for each command into FOLDER, which is made if it is not there. Packages bring them along.\n\n" +
			"Examples:\n   sudo cgpu man /usr/local/share/man/man1\n   cgpu man /tmp/man && man -l /tmp/man/cgpu-smi.1",
		Action: func(c *cli.Context) error {
			if c.NArg() != 1 {
				return usageError{errors.New("man: want one FOLDER; see cgpu man --help")}
			}
			return writePages(c.App, version, c.Args().First())
		},
	}
}

// writePages writes all man pages.
func writePages(a *cli.App, version, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("man: %w", err)
	}
	var overview bytes.Buffer
	if err := roffOverview(&overview, a, version); err != nil {
		return err
	}
	pages := map[string][]byte{a.Name: overview.Bytes()}
	for _, m := range manualsOf(a) {
		var page bytes.Buffer
		if err := m.roff(&page, version); err != nil {
			return err
		}
		pages[strings.ReplaceAll(m.name, " ", "-")] = page.Bytes()
	}
	for name, text := range pages {
		if err := os.WriteFile(filepath.Join(dir, name+".1"), text, 0o644); err != nil {
			return fmt.Errorf("man: %w", err)
		}
	}
	return nil
}

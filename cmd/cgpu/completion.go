// SPDX-License-Identifier: Apache-2.0

package main

import (
	_ "embed"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"
)

// The shells' scripts ask this program what a word could become, so they need not know the commands.
var (
	//go:embed completion/cgpu.bash
	bashCompletion string
	//go:embed completion/cgpu.zsh
	zshCompletion string
	//go:embed completion/cgpu.fish
	fishCompletion string
)

// completeName is the command that the scripts ask with. What follows is a command line as it was typed so far, without "cgpu"; the
// last word, which may be empty, is the one to complete.
const completeName = "__complete"

func completionCommand() *cli.Command {
	return &cli.Command{
		Name:      "completion",
		Usage:     "print the completion script of a shell",
		ArgsUsage: "bash|zsh|fish",
		Description: "It completes commands, options, GPUs and containers; the last two for root alone, who may read them.\n\n" +
			"Examples:\n   source <(cgpu completion bash)\n   cgpu completion bash | sudo tee /usr/share/bash-completion/completions/cgpu " +
			">/dev/null\n" +
			"   cgpu completion zsh >~/.zfunc/_cgpu\n   cgpu completion fish >~/.config/fish/completions/cgpu.fish",
		Action: func(c *cli.Context) error {
			script, ok := map[string]string{"bash": bashCompletion, "zsh": zshCompletion, "fish": fishCompletion}[c.Args().First()]
			if !ok || c.NArg() != 1 {
				return usageError{fmt.Errorf("completion: %q: want bash, zsh or fish", strings.Join(c.Args().Slice(), " "))}
			}
			_, err := io.WriteString(c.App.Writer, script)
			return err
		},
	}
}

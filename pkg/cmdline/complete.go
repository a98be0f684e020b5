// SPDX-License-Identifier: Apache-2.0

package cmdline

import (
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/event"
	"github.com/opencgpu/cgpu/pkg/ledger"
	"github.com/opencgpu/cgpu/pkg/manual"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/terminal"
	"github.com/opencgpu/cgpu/pkg/view"
)

// candidate is what a word could become, and a note for people.
type candidate struct{ Value, note string }

// PrintCandidates answers a script: a line for each candidate, with its note behind a tab.
func PrintCandidates(w io.Writer, a *cli.App, words []string) error {
	for _, c := range Complete(a, words, NodeCandidates(device.RunDir())) {
		if _, err := fmt.Fprintf(w, "%s\t%s\n", c.Value, c.note); err != nil {
			return err
		}
	}
	return nil
}

// source gives the candidates of a kind, such as "container".
type source func(kind string) []candidate

// Complete lists what the last of words could become.
func Complete(a *cli.App, words []string, of source) []candidate {
	if len(words) == 0 {
		return nil
	}
	current := words[len(words)-1]
	if len(words) == 1 {
		var list []candidate
		for _, c := range a.Commands {
			if !c.Hidden {
				list = append(list, candidate{c.Name, c.Usage})
			}
		}
		return beginning(list, current)
	}
	c := a.Command(words[0])
	if c == nil || slices.Contains(words[:len(words)-1], "--") {
		return nil
	}
	// bash makes three words of --gpu=1.
	before := words[1 : len(words)-1]
	switch n := len(before); {
	case current == "=" && n > 0:
		return valuesOf(c, before[n-1], "", of)
	case n > 1 && before[n-1] == "=":
		return valuesOf(c, before[n-2], current, of)
	case n > 0 && strings.HasPrefix(before[n-1], "-") && wantsValue(c.Flags, strings.TrimLeft(before[n-1], "-")):
		return valuesOf(c, before[n-1], current, of)
	}
	if flag, value, ok := strings.Cut(current, "="); ok && strings.HasPrefix(flag, "--") {
		list := valuesOf(c, flag, value, of)
		for i := range list {
			list[i].Value = flag + "=" + list[i].Value
		}
		return list
	}
	if strings.HasPrefix(current, "-") {
		return beginning(flagCandidates(c), current)
	}
	kinds := argumentKinds[c.Name]
	if n := len(argumentsIn(c, before)); n < len(kinds) {
		return beginning(of(kinds[n]), current)
	}
	return nil
}

// argumentsIn leaves the words that are no flags.
func argumentsIn(c *cli.Command, words []string) []string {
	list := FlagsFirst(c.Flags, words)
	if i := slices.Index(list, "--"); i >= 0 {
		return list[i+1:]
	}
	return nil
}

// argumentKinds says of what kind a command's arguments are.
var argumentKinds = map[string][]string{
	"set": {"container"}, "pause": {"container"}, "resume": {"container"}, "inspect": {"container"},
	"policy": {"gpu or all", "policy"}, "config": {"config"}, "completion": {"shell"}, "install": {"engine"}, "uninstall": {"engine"},
}

// flagKinds says of what kind a flag's value is, whatever the command.
var flagKinds = map[string]string{"gpu": "gpu", "i": "gpu", "container": "container", "filter": "filter", "kind": "kind",
	"priority": "priority"}

// formats are what -o takes, by command.
var formats = map[string][]string{"smi": {"table", "plain", "wide", "json"}, "ps": {"table", "json"}, "events": {"table", "json"},
	"doctor": {"table", "json"}, "policy": {"table", "json"}, "version": {"table", "json"}}

func valuesOf(c *cli.Command, flag, current string, of source) []candidate {
	name := strings.TrimLeft(flag, "-")
	if name == "o" || name == "output" {
		return beginning(plain(formats[c.Name]...), current)
	}
	return beginning(of(flagKinds[name]), current)
}

func flagCandidates(c *cli.Command) []candidate {
	list := []candidate{{"--help", "show help"}}
	for _, f := range c.VisibleFlags() {
		note := ""
		if d, ok := f.(cli.DocGenerationFlag); ok {
			_, note = manual.ValueName(d.GetUsage())
		}
		for _, n := range f.Names() {
			if len(n) > 1 && n != "help" {
				list = append(list, candidate{manual.Dashes(n), note})
			}
		}
	}
	return list
}

func plain(list ...string) (all []candidate) {
	for _, w := range list {
		all = append(all, candidate{Value: w})
	}
	return all
}

// beginning leaves the candidates that begin with what was typed.
func beginning(list []candidate, typed string) []candidate {
	return slices.DeleteFunc(list, func(c candidate) bool { return !strings.HasPrefix(c.Value, typed) })
}

// plainName is what a shell takes for one word, whatever it does with it. Tenants choose names.
var plainName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._/-]*$`)

// NodeCandidates knows the fixed words, and asks the node for the others. Where it may not read, there are none.
func NodeCandidates(runDir string) source {
	return func(kind string) []candidate {
		switch kind {
		case "container":
			return containerCandidates(runDir)
		case "gpu":
			return gpuCandidates(runDir)
		case "gpu or all":
			return append(gpuCandidates(runDir), candidate{"all", "every GPU"})
		case "policy":
			return plain(view.PolicyNames()...)
		case "priority":
			return plain(quota.PriorityBestEffort.String(), quota.PriorityDefault.String(), quota.PriorityHigh.String())
		case "config":
			return plain("check")
		case "shell":
			return plain("bash", "zsh", "fish")
		case "engine":
			return plain("docker", "containerd", "crio", "podman")
		case "filter":
			return plain(view.FilterWords()...)
		case "kind":
			var list []candidate
			for _, k := range event.Kinds() {
				list = append(list, candidate{Value: string(k)})
			}
			return list
		}
		return nil
	}
}

func containerCandidates(runDir string) []candidate {
	records, err := ledger.Open(runDir).List()
	if err != nil {
		return nil
	}
	var list []candidate
	for _, r := range records {
		r = snapshot.Named(r)
		if plainName.MatchString(r.Name) {
			list = append(list, candidate{r.Name, view.ShortID(r.ID)})
		}
		if plainName.MatchString(r.ID) {
			list = append(list, candidate{view.ShortID(r.ID), terminal.Printable(r.Name)})
		}
	}
	return list
}

func gpuCandidates(runDir string) []candidate {
	t, _ := device.Load(runDir)
	if t == nil {
		return nil
	}
	var list []candidate
	for _, g := range t.GPUs {
		list = append(list, candidate{strconv.Itoa(g.Index), terminal.Printable(g.Name) + " " + view.ShortUUID(g.UUID)})
	}
	return list
}

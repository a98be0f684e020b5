// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/opencgpu/cgpu/pkg/cluster"
	"github.com/opencgpu/cgpu/pkg/quota"
	"github.com/opencgpu/cgpu/pkg/terminal"
)

func inspect(ctx context.Context, args []string, w, warnings io.Writer) error {
	var c connection
	var format, unit string
	var details bool
	f := newFlags(w, "kubectl cgpu inspect [NODE...] [flags]",
		"Shows for each node what of its GPUs' memory was promised, by claims (DRA) and as aliyun.com/gpu-mem (device plugin), and\n"+
			"what waits. Promised is not used: kubectl cgpu top shows that. With -n only the pods and claims of a namespace are listed;\n"+
			"the sums stay those of all.")
	c.flags(f)
	f.BoolVarP(&details, "details", "d", false, "list the shares of each node")
	f.StringVarP(&format, "output", "o", "", "`format`: wide (a line for each GPU) or json")
	f.StringVar(&unit, "unit", "", "`size` of one aliyun.com/gpu-mem, such as GiB or 256MiB (default: guessed; GiB, or MiB where a GPU "+
		"has more than 1023)")
	if err := parse(f, args); err != nil {
		return err
	}
	if !slices.Contains([]string{"", "wide", "json"}, format) {
		return usageError{fmt.Errorf("inspect: -o %q: want wide or json", format)}
	}
	size, err := unitOf(unit)
	if err != nil {
		return usageError{fmt.Errorf("inspect: --unit %q: %w", unit, err)}
	}
	client, namespace, err := c.client()
	if err != nil {
		return err
	}
	o, err := fetch(ctx, client, namespace, warner(warnings))
	if err != nil {
		return err
	}
	o.Unit = size
	view, err := choose(cluster.Of(o), f.Args(), namespace)
	if err != nil {
		return err
	}
	switch {
	case format == "json":
		return terminal.EncodeJSON(w, view, "  ")
	case format == "wide":
		err = printWide(w, view)
	case details:
		err = printDetails(w, view)
	default:
		err = printNodes(w, view)
	}
	if err == nil {
		err = printPending(w, view)
	}
	return err
}

func warner(w io.Writer) func(string, ...any) {
	return func(format string, args ...any) {
		fmt.Fprintf(w, "kubectl cgpu: warning: %s\n", terminal.Printable(fmt.Sprintf(format, args...)))
	}
}

// unitOf reads --unit; zero: guess.
func unitOf(text string) (quota.Bytes, error) {
	switch text {
	case "":
		return 0, nil
	case "GiB", "MiB":
		text = "1" + text
	}
	for suffix, size := range map[string]quota.Bytes{"GiB": quota.GiB, "MiB": quota.MiB} {
		if number, ok := strings.CutSuffix(text, suffix); ok {
			if n, err := strconv.ParseUint(number, 10, 20); err == nil && n > 0 {
				return quota.Bytes(n) * size, nil
			}
		}
	}
	return 0, fmt.Errorf("want a size such as GiB or 256MiB")
}

// choose leaves the nodes that were named, and of pods and claims those of a namespace. Sums are not touched.
func choose(c cluster.Cluster, nodes []string, namespace string) (cluster.Cluster, error) {
	for _, name := range nodes {
		if !slices.ContainsFunc(c.Nodes, func(n cluster.Node) bool { return n.Name == name }) {
			return c, fmt.Errorf("inspect: node %q: has no GPU of cgpu, or is not there; kubectl cgpu inspect lists those that have", name)
		}
	}
	if len(nodes) > 0 {
		c.Nodes = slices.DeleteFunc(c.Nodes, func(n cluster.Node) bool { return !slices.Contains(nodes, n.Name) })
		// Who waits without a node may get one of these.
		c.Pending = slices.DeleteFunc(c.Pending, func(p cluster.Waiting) bool { return p.Node != "" && !slices.Contains(nodes, p.Node) })
	}
	if namespace == "" {
		return c, nil
	}
	other := func(s cluster.Share) bool { return s.Namespace != namespace }
	for i := range c.Nodes {
		n := &c.Nodes[i]
		for g := range n.GPUs {
			n.GPUs[g].Shares = slices.DeleteFunc(n.GPUs[g].Shares, other)
		}
		n.Unplaced = slices.DeleteFunc(n.Unplaced, other)
	}
	c.Pending = slices.DeleteFunc(c.Pending, func(p cluster.Waiting) bool { return p.Namespace != namespace })
	return c, nil
}

// table aligns columns; a row is cells separated by tabs. What others chose is made harmless.
type table struct{ *tabwriter.Writer }

func newTable(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)} }

func (t table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = terminal.Printable(cmp.Or(c, "-"))
	}
	fmt.Fprintln(t, strings.Join(cells, "\t"))
}

// printNodes is gpushare's table: a line for each node, a column for each GPU.
func printNodes(w io.Writer, c cluster.Cluster) error {
	if len(c.Nodes) == 0 {
		_, err := fmt.Fprintln(w, "No node offers a GPU: see kubectl get resourceslices, and the pods of cgpu-agent.")
		return err
	}
	columns, unplaced := 0, false
	for _, n := range c.Nodes {
		columns = max(columns, len(n.GPUs))
		unplaced = unplaced || len(n.Unplaced) > 0
	}
	t := newTable(w)
	head := []string{"NAME", "IPADDRESS"}
	for i := range columns {
		head = append(head, fmt.Sprintf("GPU%d(Allocated/Total)", i))
	}
	if unplaced {
		head = append(head, "PENDING(Allocated)")
	}
	t.row(append(head, "GPU Memory(GiB)")...)
	var promised, total quota.Bytes
	for _, n := range c.Nodes {
		cells := []string{n.Name, n.Address}
		for i := range columns {
			cell := ""
			if i < len(n.GPUs) {
				cell = memory(n.GPUs[i])
			}
			cells = append(cells, cell)
		}
		if unplaced {
			cells = append(cells, gib(sum(n.Unplaced)))
		}
		promised, total = promised+n.Promised, total+n.Total
		t.row(append(cells, gib(n.Promised)+"/"+gib(n.Total))...)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(w, "%s\nAllocated/Total GPU Memory In Cluster:\n%s\n", rule, part(promised, total))
	return err
}

const rule = "------------------------------------------------------------"

// printDetails lists the shares of each node.
func printDetails(w io.Writer, c cluster.Cluster) error {
	var promised, total quota.Bytes
	for _, n := range c.Nodes {
		fmt.Fprintf(w, "NAME:       %s\nIPADDRESS:  %s\n\n", terminal.Printable(n.Name), terminal.Printable(cmp.Or(n.Address, "-")))
		t := newTable(w)
		head := []string{"NAME", "NAMESPACE", "CLAIM"}
		for _, g := range n.GPUs {
			head = append(head, fmt.Sprintf("GPU%d(Allocated)", g.Index))
		}
		if len(n.Unplaced) > 0 {
			head = append(head, "PENDING(Allocated)")
		}
		t.row(append(head, "CORES")...)
		line := func(s cluster.Share, column int) {
			cells := []string{pods(s), s.Namespace, s.Claim}
			for i := range len(head) - 3 {
				cell := "0"
				if i == column {
					cell = gib(s.Memory)
				}
				cells = append(cells, cell)
			}
			t.row(append(cells, cores(s.Cores))...)
		}
		for i, g := range n.GPUs {
			for _, s := range g.Shares {
				line(s, i)
			}
		}
		for _, s := range n.Unplaced {
			line(s, len(n.GPUs))
		}
		if err := t.Flush(); err != nil {
			return err
		}
		promised, total = promised+n.Promised, total+n.Total
		fmt.Fprintf(w, "Allocated : %s\nTotal :     %s GiB\n%s\n", part(n.Promised, n.Total), gib(n.Total), rule)
	}
	_, err := fmt.Fprintf(w, "\nAllocated/Total GPU Memory In Cluster:  %s\n", part(promised, total))
	return err
}

// printWide has a line for each GPU.
func printWide(w io.Writer, c cluster.Cluster) error {
	t := newTable(w)
	t.row("NODE", "GPU", "MODEL", "UUID", "BY", "MEMORY(GiB)", "CORES", "SHARES", "PODS")
	for _, n := range c.Nodes {
		for _, g := range n.GPUs {
			users := 0
			for _, s := range g.Shares {
				users += len(s.Pods)
			}
			t.row(n.Name, strconv.Itoa(g.Index), terminal.Cut(g.Model, 24), cmp.Or(g.UUID, g.Device), g.FrontEnd, memory(g), cores(g.Cores),
				strconv.Itoa(len(g.Shares)), strconv.Itoa(users))
		}
		if len(n.Unplaced) > 0 {
			t.row(n.Name, "?", "", "", cluster.FrontEndDevicePlugin, gib(sum(n.Unplaced))+
				"/?", "", strconv.Itoa(len(n.Unplaced)), strconv.Itoa(len(n.Unplaced)))
		}
	}
	return t.Flush()
}

// mostWaiting lines are listed: a batch of a thousand pods would push the table off the screen.
const mostWaiting = 20

// printPending lists who waits, with why.
func printPending(w io.Writer, c cluster.Cluster) error {
	if len(c.Pending) == 0 {
		return nil
	}
	fmt.Fprintf(w, "\nWaiting:\n")
	t := newTable(w)
	t.row("NAMESPACE", "KIND", "NAME", "NODE", "WANTS", "WHY")
	for _, p := range c.Pending[:min(len(c.Pending), mostWaiting)] {
		t.row(p.Namespace, p.Kind, p.Name, p.Node, p.Wants, terminal.Cut(p.Why, 200))
	}
	if err := t.Flush(); err != nil || len(c.Pending) <= mostWaiting {
		return err
	}
	_, err := fmt.Fprintf(w, "… and %d more: -o json lists all, -n those of a namespace\n", len(c.Pending)-mostWaiting)
	return err
}

// memory is a GPU's cell.
func memory(g cluster.GPU) string {
	if g.Gone {
		return gib(g.Promised) + "/gone"
	}
	return gib(g.Promised) + "/" + gib(g.Total)
}

func pods(s cluster.Share) string {
	name := strings.Join(s.Pods, ",")
	if s.Admin {
		name += " (admin access)"
	}
	return name
}

func cores(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10) + "%"
}

func sum(list []cluster.Share) (total quota.Bytes) {
	for _, s := range list {
		total += s.Memory
	}
	return total
}

// gib writes GiB as gpushare's users know them, whole where they are; else with two digits, rounded to the nearest.
func gib(b quota.Bytes) string {
	if b%quota.GiB == 0 {
		return strconv.FormatUint(uint64(b/quota.GiB), 10)
	}
	return strings.TrimRight(strings.TrimRight(strconv.FormatFloat(float64(b)/float64(quota.GiB), 'f', 2, 64), "0"), ".")
}

func part(promised, total quota.Bytes) string {
	percent := "-"
	if total > 0 {
		percent = strconv.Itoa(int(float64(promised)/float64(total)*100)) + "%"
	}
	return gib(promised) + "/" + gib(total) + " (" + percent + ")"
}

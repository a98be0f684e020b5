// SPDX-License-Identifier: Apache-2.0

// Package exporter tells Prometheus what pkg/snapshot sees: the node's GPUs, who shares them, what each container may have, has, and has
// had (pkg/tally). `cgpu exporter` serves it, and cgpu-agent among its own figures.
//
// What is not known is absent, and never zero. docs/metrics.md lists the series, from the table in series.go.
package exporter

import (
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/snapshot"
	"github.com/opencgpu/cgpu/pkg/tally"
)

// Fresh is how long a look serves: whoever scrapes makes guards be asked once in this time, no oftener.
const Fresh = time.Second

// Options of New.
type Options struct {
	RunDir  string
	Version string
	// Load makes a table where there is none; nil: then the node is not up.
	Load func(runDir string) (*device.Table, error)
	// Hardware asks NVML, where the driver is NVIDIA's; nil: nobody does.
	Hardware func() (map[string]device.Hardware, error)
}

// Exporter is a prometheus.Gatherer of the node. It may be used by many goroutines, of which one looks. It is no Collector: a registry
// would compare the labels of each series with all others', and takes as long for that as the look does.
type Exporter struct {
	Options
	root string // of /proc
	now  func() time.Time

	names snapshot.Names

	mu   sync.Mutex
	at   time.Time
	last []*dto.MetricFamily
}

// New makes an exporter.
func New(o Options) *Exporter { return &Exporter{Options: o, root: "/", now: time.Now} }

// Gather implements prometheus.Gatherer. It has no error: what is wrong is a series. What was told a moment ago is told again.
func (c *Exporter) Gather() ([]*dto.MetricFamily, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.now(); c.at.IsZero() || now.Sub(c.at) >= Fresh || now.Before(c.at) {
		c.last = c.collect().families()
		c.at = c.now()
	}
	return slices.Clone(c.last), nil
}

// families are all series, by name.
func (p picture) families() []*dto.MetricFamily {
	families := make([]*dto.MetricFamily, len(all))
	p.tell(func(s *series, value float64, labels []*dto.LabelPair) {
		f := families[s.place]
		if f == nil {
			f = &dto.MetricFamily{Name: &s.name, Help: &s.help, Type: &s.kind}
			families[s.place] = f
		}
		m := &dto.Metric{Label: labels}
		if s.kind == counter {
			m.Counter = &dto.Counter{Value: &value}
		} else {
			m.Gauge = &dto.Gauge{Value: &value}
		}
		f.Metric = append(f.Metric, m)
	})
	families = slices.DeleteFunc(families, func(f *dto.MetricFamily) bool { return f == nil })
	slices.SortFunc(families, func(a, b *dto.MetricFamily) int { return strings.Compare(a.GetName(), b.GetName()) })
	return families
}

func (c *Exporter) collect() picture {
	p := picture{version: c.Version}
	if p.view, p.err = snapshot.Look(c.RunDir, c.Load, &c.names); p.err != nil {
		return p
	}
	var wg sync.WaitGroup
	if c.Hardware != nil && p.view.Driver == device.DriverNVIDIA {
		p.asked = true
		wg.Go(func() { p.hardware, p.hardwareErr = c.Hardware() })
	}
	p.guards = residents(c.root, p.view)
	p.counted, p.err = tally.Read(c.RunDir) // after the guards were asked, so that it has what they counted then
	wg.Wait()
	return p
}

// Text writes everything in the text format of Prometheus (version 0.0.4).
func (c *Exporter) Text(w io.Writer) error {
	families, err := c.Gather()
	if err != nil {
		return err
	}
	e := expfmt.NewEncoder(w, expfmt.NewFormat(expfmt.TypeTextPlain))
	for _, f := range families {
		if err := e.Encode(f); err != nil {
			return err
		}
	}
	return nil
}

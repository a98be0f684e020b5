// SPDX-License-Identifier: Apache-2.0

package v1alpha1

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kjson "sigs.k8s.io/json"
)

// APIVersion and Kind of a VGPUConfig.
const (
	APIVersion = "cgpu.io/v1alpha1"
	Kind       = "VGPUConfig"
)

// Bounds. deploy/base/admission.yaml has the same.
const (
	MaxWeight     = 64
	MaxPercent    = 100
	MaxContainers = 64
	// MaxParameters is what the API server takes of opaque parameters (resource.k8s.io/v1, OpaqueParametersMaxLength).
	MaxParameters = 10 << 10
)

var (
	priorities = []string{"best-effort", "default", "high"}
	minSpill   = resource.MustParse("1Mi")
	maxSpill   = resource.MustParse("1Pi")
	domainName = regexp.MustCompile("^[A-Za-z0-9][A-Za-z0-9-]{0,62}$")
)

// VGPUConfig is how a share of a GPU is to be had. A field that is absent is nil: it leaves to a class, or to the node, what
// it would say.
type VGPUConfig struct {
	metav1.TypeMeta `json:",inline"`

	// Weight of the share among those that wait for the GPU, 1 to 64. Each container has an equal part of it, at least 1.
	Weight *int64 `json:"weight,omitempty"`
	// Priority is best-effort, default or high.
	Priority *string `json:"priority,omitempty"`
	// Percent of the GPU's time that all containers of the share get at most. It can only lower the claim's capacity
	// "cores", which the scheduler counts.
	Percent *int64 `json:"percent,omitempty"`
	// Spill is host memory that serves as device memory beyond the share: 0, or 1Mi and more. Each container has an equal part.
	Spill *resource.Quantity `json:"spill,omitempty"`
	// Containers may use the share at the same time, and each gets an equal part of its memory and cores. It can only lower
	// the claim's capacity "containers", which the scheduler counts.
	Containers *int64 `json:"containers,omitempty"`
	// Domain is the trust domain, among those of the claim's namespace, whose members compute side by side through an MPS server. The
	// node must let the namespace have it.
	Domain *string `json:"domain,omitempty"`
}

// Decode reads the parameters of an opaque configuration strictly: a field that is misspelled would else be a setting that
// silently is not there.
func Decode(raw []byte) (*VGPUConfig, error) {
	c, err := decode(raw)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", Kind, err)
	}
	return c, nil
}

func decode(raw []byte) (*VGPUConfig, error) {
	if len(raw) > MaxParameters {
		return nil, fmt.Errorf("has %d bytes, at most %d are read", len(raw), MaxParameters)
	}
	// What it is comes first: the fields of another kind are not misspelled.
	var meta metav1.TypeMeta
	if err := kjson.UnmarshalCaseSensitivePreserveInts(raw, &meta); err != nil {
		return nil, err
	}
	if meta.APIVersion != APIVersion || meta.Kind != Kind {
		return nil, fmt.Errorf("apiVersion %q, kind %q: want apiVersion: %s, kind: %s", meta.APIVersion, meta.Kind, APIVersion, Kind)
	}
	c := new(VGPUConfig)
	strict, err := kjson.UnmarshalStrict(raw, c, kjson.DisallowUnknownFields, kjson.DisallowDuplicateFields)
	if err = errors.Join(append(strict, err)...); err != nil {
		return nil, errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	return c, c.Validate()
}

// Validate checks what does not need to know the claim.
func (c *VGPUConfig) Validate() error {
	number := func(name string, value *int64, most int64) error {
		if value != nil && (*value < 1 || *value > most) {
			return fmt.Errorf("%s: %d: want 1 to %d", name, *value, most)
		}
		return nil
	}
	if err := errors.Join(
		number("weight", c.Weight, MaxWeight),
		number("percent", c.Percent, MaxPercent),
		number("containers", c.Containers, MaxContainers),
	); err != nil {
		return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	if c.Priority != nil && !slices.Contains(priorities, *c.Priority) {
		return fmt.Errorf("priority: %.32q: want %s", *c.Priority, strings.Join(priorities, ", "))
	}
	if c.Domain != nil && !domainName.MatchString(*c.Domain) {
		return fmt.Errorf("domain: %.64q: want 1 to 63 letters, digits and dashes, the first no dash", *c.Domain)
	}
	if s := c.Spill; s != nil && !s.IsZero() && (s.Cmp(minSpill) < 0 || s.Cmp(maxSpill) > 0) {
		return fmt.Errorf("spill: %s: want 0, or %s to %s of host memory", s, &minSpill, &maxSpill)
	}
	return nil
}

// Override sets in c what o says.
func (c *VGPUConfig) Override(o *VGPUConfig) {
	if o.Weight != nil {
		c.Weight = o.Weight
	}
	if o.Priority != nil {
		c.Priority = o.Priority
	}
	if o.Percent != nil {
		c.Percent = o.Percent
	}
	if o.Spill != nil {
		c.Spill = o.Spill
	}
	if o.Containers != nil {
		c.Containers = o.Containers
	}
	if o.Domain != nil {
		c.Domain = o.Domain
	}
}

// Default fills in what a share has of which nobody said anything. Percent and Containers stay absent: they are what the
// claim consumes; and so does Domain.
func (c *VGPUConfig) Default() {
	weight, priority := int64(1), "default"
	d := &VGPUConfig{Weight: &weight, Priority: &priority, Spill: resource.NewQuantity(0, resource.BinarySI)}
	d.Override(c)
	d.TypeMeta = metav1.TypeMeta{APIVersion: APIVersion, Kind: Kind}
	*c = *d
}

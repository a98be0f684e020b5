// SPDX-License-Identifier: Apache-2.0

package spec

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/jsonspan"
	"github.com/opencgpu/cgpu/pkg/quota"
)

// marks are texts of which one is in the config.json of every container that asks for a vGPU, or that looks as if it were to
// (quota.Missed).
var marks = [][]byte{[]byte("ALIYUN_COM_GPU_"), []byte("CGPU_"), []byte("cgpu.io"), []byte("aliyun_com_gpu_"), []byte("cgpu_")}

// MayAsk says whether config.json can belong to a container that asks for a vGPU, or means to. It is a search for bytes, so that
// the containers of other people cost no decoding and cannot fail by our fault.
func MayAsk(raw []byte) bool {
	return slices.ContainsFunc(marks, func(mark []byte) bool { return bytes.Contains(raw, mark) })
}

// MaySpeak lists the dialects in which config.json may ask for something, found as MayAsk finds cgpu's own words. Which of
// them count is the node's to say; a container that speaks none costs no look at the node.
func MaySpeak(raw []byte) (may []quota.Dialect) {
	for _, d := range quota.Dialects() {
		if slices.ContainsFunc(d.Marks(), func(mark string) bool { return bytes.Contains(raw, []byte(mark)) }) {
			may = append(may, d)
		}
	}
	return may
}

// Env is the container's environment, process.env.
func (d *Document) Env() ([]string, error) {
	process, err := d.within("process")
	if process == nil || err != nil {
		return nil, err
	}
	list, err := elements(process.get("env"))
	if err != nil {
		return nil, fmt.Errorf("spec: process.env: %w", err)
	}
	env := make([]string, len(list))
	for i, raw := range list {
		if env[i], err = unquote(raw); err != nil {
			return nil, fmt.Errorf("spec: process.env[%d]: %w", i, err)
		}
	}
	return env, nil
}

// Annotations are the container's annotations.
func (d *Document) Annotations() (map[string]string, error) {
	o, err := d.root.sub("annotations", false)
	if o == nil || err != nil {
		return nil, err
	}
	annotations := make(map[string]string, len(o.members))
	for _, m := range o.members {
		if annotations[m.key], err = unquote(m.value); err != nil {
			return nil, fmt.Errorf("spec: annotations: %q: %w", m.key, err)
		}
	}
	return annotations, nil
}

// Words are the variables and annotations of a config.json as they are, also where it is not to be edited: of members that occur more
// than once those of all count, and what follows the JSON does not.
func Words(raw []byte) (env []string, annotations map[string]string, err error) {
	raw = raw[:jsonspan.SkipValue(raw, jsonspan.SkipSpace(raw, 0))]
	if !json.Valid(raw) {
		return nil, nil, fmt.Errorf("spec: config.json is not valid JSON: %w", invalid(raw))
	}
	annotations = map[string]string{}
	err = each(raw, "process", func(process []byte) error {
		return each(process, "env", func(list []byte) error {
			entries, err := elements(list)
			for _, e := range entries {
				entry, err := unquote(e)
				if err != nil {
					return err
				}
				env = append(env, entry)
			}
			return err
		})
	})
	if err == nil {
		err = each(raw, "annotations", func(all []byte) error {
			o, err := takeApart(all, false)
			if err != nil {
				return err
			}
			for _, m := range o.members {
				if annotations[m.key], err = unquote(m.value); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return env, annotations, err
}

// each calls f with the value of every member of raw that is called key, but for null.
func each(raw []byte, key string, f func(value []byte) error) error {
	o, err := takeApart(raw, true)
	if err != nil {
		return err
	}
	for i := range o.members {
		if m := &o.members[i]; o.is(m, key) && string(m.value) != "null" {
			if err := f(m.value); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
	}
	return nil
}

// Root is the container's root folder, root.path; it may be relative to the bundle.
func (d *Document) Root() (string, error) {
	root, err := d.within("root")
	if root == nil || err != nil {
		return "", err
	}
	raw := root.get("path")
	if raw == nil {
		return "", nil
	}
	path, err := unquote(raw)
	if err != nil {
		return "", fmt.Errorf("spec: root.path: %w", err)
	}
	return path, nil
}

// MakeAbsolute makes the document independent of the place of its bundle: the root folder, and what is mounted of the bundle.
func (d *Document) MakeAbsolute(bundle string) error {
	path, err := d.Root()
	if err != nil {
		return err
	}
	if path != "" && !filepath.IsAbs(path) {
		root, err := d.within("root")
		if err != nil {
			return err
		}
		root.set("path", quote(filepath.Join(bundle, path)))
	}
	mounts, err := d.list("mounts")
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	for i, raw := range mounts {
		var m specs.Mount
		if err := json.Unmarshal(raw, &m); err != nil {
			return fmt.Errorf("spec: mounts[%d]: %w", i, err)
		}
		bind := m.Type == "bind" || slices.Contains(m.Options, "bind") || slices.Contains(m.Options, "rbind")
		if !bind || filepath.IsAbs(m.Source) {
			continue
		}
		o, err := parseObject(raw, true)
		if err != nil {
			return fmt.Errorf("spec: mounts[%d]: %w", i, err)
		}
		o.set("source", quote(filepath.Join(bundle, m.Source)))
		mounts[i] = o.append(nil)
		if err := d.setList(mounts, "mounts"); err != nil {
			return err
		}
	}
	return nil
}

// Engines write these behind all other annotations, each its own and not the other's. CRI-O copies a pod's annotations, so there
// containerd's can be the author's: what one says counts for less than what both do.
const (
	containerdType = "io.kubernetes.cri.container-type"
	crioType       = "io.kubernetes.cri-o.ContainerType"
)

// IsSandbox says whether annotations are those of a pod's pause container, which gets the pod's annotations and never
// a GPU.
func IsSandbox(annotations map[string]string) bool {
	return !IsPod(annotations) && (annotations[containerdType] == "sandbox" || annotations[crioType] == "sandbox")
}

// IsPod says whether annotations are those of a pod's container, as CRI engines write them. A pause container whose pod's author
// writes that it is none is one to us; that does nothing for him. (Docker below cri-dockerd writes none: to us its pods are
// containers like any.)
func IsPod(annotations map[string]string) bool {
	return annotations[containerdType] == "container" || annotations[crioType] == "container"
}

// IsCRIO says whether CRI-O made the container. It copies a pod's annotations to its containers, whatever their names are, so
// there an annotation can be the author's that elsewhere is the device plugin's.
func IsCRIO(annotations map[string]string) bool {
	return annotations[crioType] != ""
}

// PodContainer is what the kubelet calls a container of a pod.
type PodContainer struct{ Namespace, Pod, UID, Container string }

// ContainerOf reads it from containerd's annotations; empty where it is not whole.
func ContainerOf(annotations map[string]string) PodContainer {
	const prefix = "io.kubernetes.cri."
	c := PodContainer{annotations[prefix+"sandbox-namespace"], annotations[prefix+"sandbox-name"], annotations[prefix+"sandbox-uid"],
		annotations[prefix+"container-name"]}
	if c.Namespace == "" || c.Pod == "" || c.UID == "" || c.Container == "" {
		return PodContainer{}
	}
	return c
}

// Name is a name for people where the engine tells one, as namespace/pod/container.
func Name(annotations map[string]string) string {
	namespace, pod, container := "io.kubernetes.cri.sandbox-namespace", "io.kubernetes.cri.sandbox-name", "io.kubernetes.cri.container-name"
	if IsCRIO(annotations) {
		// The kubelet's labels of the container, which CRI-O makes annotations of behind the pod's.
		namespace, pod, container = "io.kubernetes.pod.namespace", "io.kubernetes.pod.name", "io.kubernetes.container.name"
	}
	if annotations[pod] == "" || annotations[container] == "" {
		return ""
	}
	return annotations[namespace] + "/" + annotations[pod] + "/" + annotations[container]
}

// UseInjected corrects q by the GPUs that an earlier injector (Docker 29 and CRI with CDI, a device plugin) already put
// into the document. Such an injector leaves NVIDIA_VISIBLE_DEVICES=void behind the user's own value, or in its place,
// so the nodes are the only reliable statement of what --gpus asked for.
func UseInjected(doc *Document, q *quota.Quota, gpus []device.GPU) error {
	named, err := injected(doc, gpus)
	if err != nil || len(named) == 0 {
		return err
	}
	if q.NamesGPUs() {
		q.Native = quota.Selector{IDs: without(named, q.Visible, gpus)}
		return nil
	}
	q.Visible, q.Native = quota.Selector{IDs: named}, quota.Selector{}
	return nil
}

// injected lists the indices of the GPUs that have both their node and an exact cgroup rule in the document. A
// privileged container has the node of every GPU of the host, so there the rule is what tells.
func injected(doc *Document, gpus []device.GPU) ([]string, error) {
	nodes, _, err := readNodes(doc)
	if err != nil {
		return nil, err
	}
	rules, _, err := readRules(doc)
	if err != nil {
		return nil, err
	}
	var named []string
	for _, g := range gpus {
		if g.Node.Bind {
			continue
		}
		hasNode := slices.ContainsFunc(nodes, func(n specs.LinuxDevice) bool { return isNode(n, g.Node) })
		hasRule := slices.ContainsFunc(rules, func(r specs.LinuxDeviceCgroup) bool { return r.Allow && isRuleOf(r, g.Node) })
		if hasNode && hasRule {
			named = append(named, strconv.Itoa(g.Index))
		}
	}
	return named, nil
}

// without drops from indices the GPUs that s selects.
func without(indices []string, s quota.Selector, gpus []device.GPU) []string {
	if s.All {
		return nil
	}
	sliced := map[string]bool{}
	for _, id := range s.IDs {
		sliced[id] = true
		for _, g := range gpus {
			if len(id) <= len(g.UUID) && bytes.EqualFold([]byte(g.UUID[:len(id)]), []byte(id)) {
				sliced[strconv.Itoa(g.Index)] = true
			}
		}
	}
	return slices.DeleteFunc(indices, func(i string) bool { return sliced[i] })
}

// DRM lists the container's nodes under /dev/dri, which may be an NVIDIA card's. Only the kernel can tell, so the
// caller asks it and puts those that are into Plan.Hidden.
func (d *Document) DRM() ([]device.Node, error) {
	const drmMajor = 226 // DRM_MAJOR in include/drm/drm_drv.h
	nodes, _, err := readNodes(d)
	if err != nil {
		return nil, fmt.Errorf("spec: %w", err)
	}
	var drm []device.Node
	for _, n := range nodes {
		if character(n) && n.Major == drmMajor {
			drm = append(drm, device.Node{Path: n.Path, HostPath: n.Path, Major: drmMajor, Minor: uint32(n.Minor)})
		}
	}
	return drm, nil
}

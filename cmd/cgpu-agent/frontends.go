// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/decision"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/dra"
	"github.com/opencgpu/cgpu/pkg/nri"
)

// divisionOf divides the GPUs, where flags have lists of them; nil: the one front end has all.
//
// What it finds is kept beside the DRA driver's sockets, where that is: claims outlive a boot, and the run directory does not. Shares of
// a device plugin alone are given away anew after one.
func divisionOf(s settings) *agent.Division {
	lists := map[string]agent.Selection{}
	for name, list := range map[string]*agent.Selection{frontDRA: s.draGPUs, frontPlugin: s.pluginGPUs} {
		if list != nil {
			lists[name] = *list
		}
	}
	if len(lists) == 0 {
		return nil
	}
	file := filepath.Join(device.RunDir(), "gpus.json")
	if slices.Contains(s.frontEnds, frontDRA) {
		file = filepath.Join(s.kubeletDir, "plugins", dra.DriverName, "gpus.json")
	}
	return agent.NewDivision(file, device.RunDir(), lists)
}

// frontEnds are those that the settings name, not started yet.
func frontEnds(s settings, client kubernetes.Interface, pods *agent.Pods, division *agent.Division,
	log *slog.Logger) (list []agent.FrontEnd) {
	for _, name := range s.frontEnds {
		f := agent.FrontEnd{Name: name}
		if division != nil {
			f.Mine, f.Others = division.Of(name)
		}
		log := log.With("frontend", name)
		if scheduler := decision.Find(name); scheduler != nil {
			f.Start = func(ctx context.Context, t *device.Table, _ func(device.GPU) bool) (agent.Server, error) {
				client, err := connect(s.kubeconfig, atOnce)
				if err != nil {
					return nil, err
				}
				return server(nri.Start(ctx, nri.Options{Node: s.node, Client: client, Socket: s.nriSocket, Scheduler: scheduler,
					RunDir: device.RunDir(), Hook: s.hook, Table: t, Log: log}))
			}
		} else if name == frontPlugin {
			f.Start = func(ctx context.Context, t *device.Table, gpus func(device.GPU) bool) (agent.Server, error) {
				return server(deviceplugin.Start(ctx, deviceplugin.Options{Node: s.node, Client: client, Pods: pods.GPU, Tell: pods.Tell,
					RunDir: device.RunDir(), KubeletDir: filepath.Join(s.kubeletDir, "device-plugins"), Unit: s.unit, Names: s.names,
					GPUs: gpus, Table: t, Log: log}))
			}
		} else {
			f.Start = func(ctx context.Context, t *device.Table, gpus func(device.GPU) bool) (agent.Server, error) {
				return server(dra.Start(ctx, dra.Options{Node: s.node, Client: client, RunDir: device.RunDir(), CDIDir: s.cdiDir,
					PluginDir: filepath.Join(s.kubeletDir, "plugins"), RegistryDir: filepath.Join(s.kubeletDir, "plugins_registry"),
					Hook: s.hook, PodUID: s.podUID, GPUs: gpus, Table: t, Log: log}))
			}
		}
		list = append(list, f)
	}
	return list
}

// server keeps a nil pointer from being taken for a front end.
func server[T agent.Server](s T, err error) (agent.Server, error) {
	if err != nil {
		return nil, err
	}
	return s, nil
}

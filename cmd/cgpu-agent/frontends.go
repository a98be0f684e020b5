package main

import (
	"context"
	"log/slog"
	"path/filepath"

	"k8s.io/client-go/kubernetes"

	"github.com/opencgpu/cgpu/pkg/agent"
	"github.com/opencgpu/cgpu/pkg/device"
	"github.com/opencgpu/cgpu/pkg/deviceplugin"
	"github.com/opencgpu/cgpu/pkg/dra"
)

// frontEnds are those that the settings name, not started yet.
func frontEnds(s settings, client kubernetes.Interface, log *slog.Logger) (list []agent.FrontEnd) {
	for _, name := range s.frontEnds {
		f := agent.FrontEnd{Name: name}
		mine, others := s.draGPUs, s.pluginGPUs
		if name == frontPlugin {
			mine, others = others, mine
		}
		if mine != nil {
			f.Mine = mine.Has
		}
		if others != nil {
			f.Others = others.Has
		}
		log := log.With("frontend", name)
		if name == frontPlugin {
			f.Start = func(ctx context.Context, t *device.Table, gpus func(device.GPU) bool) (agent.Server, error) {
				return server(deviceplugin.Start(ctx, deviceplugin.Options{Node: s.node, Client: client, RunDir: device.RunDir(),
					KubeletDir: filepath.Join(s.kubeletDir, "device-plugins"), Unit: s.unit, GPUs: gpus, Table: t, Log: log}))
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

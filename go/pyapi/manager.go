package pyapi

import (
	"context"
	"errors"
	"path/filepath"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/rankclient"
)

// ManagerServerStart connects to the lighthouse and serves; the result is a handle for Address and
// ReleaseStart.
func ManagerServerStart(
	replicaID, lighthouseAddr, hostname, bind, storeAddr string, worldSize, heartbeatIntervalUs,
	connectTimeoutUs, quorumRetries int64, security string,
) (op int64, err error) {
	defer ops.Guard(&err)
	protected, err := parseSecurity(security)
	if err != nil {
		return 0, err
	}
	cfg := manager.ServerConfig{
		ReplicaID:         replicaID,
		LighthouseAddr:    lighthouseAddr,
		Hostname:          hostname,
		Bind:              bind,
		StoreAddr:         storeAddr,
		WorldSize:         worldSize,
		HeartbeatInterval: micros(heartbeatIntervalUs),
		ConnectTimeout:    micros(connectTimeoutUs),
		QuorumRetries:     quorumRetries,
		Security:          protected.Security,
		Job:               protected.Job,
	}
	// An address that cannot be parsed is a RuntimeError, like one that cannot be reached.
	if !filepath.IsAbs(lighthouseAddr) { // a file may be missing until it joins
		if _, err := rpc.ParseAddresses("lighthouse_addr", lighthouseAddr); err != nil {
			return 0, err
		}
	}
	if err := cfg.Validate(); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	return ops.Start(cfg.ConnectTimeout+bindTimeout, func(ctx context.Context) (any, error) {
		joined, err := lighthouses.Join(ctx, cfg.LighthouseAddr, cfg.ReplicaID, cfg.ConnectTimeout,
			rpc.Dialing{Security: cfg.Security, Job: cfg.Job, Run: protected.Run})
		if err != nil {
			return nil, connectFailed(err)
		}
		cfg.Membership = joined
		server, err := manager.NewServer(cfg)
		return server, connectFailed(err)
	}), nil
}

// ManagerClientStart connects to a manager server; the result is a handle.
func ManagerClientStart(addr string, connectTimeoutUs int64, security string) (op int64, err error) {
	defer ops.Guard(&err)
	protected, err := parseSecurity(security)
	if err != nil {
		return 0, err
	}
	timeout := micros(connectTimeoutUs)
	return ops.Start(timeout+bindTimeout, func(ctx context.Context) (any, error) {
		client, err := rankclient.Dial(ctx, addr, timeout, rpc.Dialing{Security: protected.Security})
		return client, connectFailed(err)
	}), nil
}

// ManagerCheckpointMetadataStart requests the checkpoint address that a group rank announced, a text.
func ManagerCheckpointMetadataStart(handle, groupRank, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *rankclient.Client) (any, error) {
		metadata, err := c.CheckpointMetadata(ctx, groupRank)
		return metadata, ops.CallFailed(err)
	})
}

// ManagerServerFinish is called before the server is released if the training is complete, but not if it was
// preempted. step is the number of committed steps, 0 if it is not known.
func ManagerServerFinish(handle, step int64) (found bool, err error) {
	return with(handle, func(server *manager.Server) (bool, error) {
		server.Finish(step)
		return true, nil
	})
}

// ManagerTrace sets the W3C trace context of the step for the next quorum and vote. A rank that traces calls
// it before each quorum.
func ManagerTrace(handle int64, traceparent string) (found bool, err error) {
	return with(handle, func(client *rankclient.Client) (bool, error) {
		client.Trace.Store(&traceparent)
		return true, nil
	})
}

// ManagerLeaveStart announces that the group has completed its last step, and waits until its peers no longer
// need its data.
func ManagerLeaveStart(handle, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *rankclient.Client) (any, error) {
		return nil, ops.CallFailed(c.Leave(ctx))
	})
}

// connectFailed makes the error of a constructor a RuntimeError in Python, even for a peer that is late.
func connectFailed(err error) error {
	if err == nil {
		return nil
	}
	return ops.As(ops.Runtime, errors.New(rpc.Message(err)))
}

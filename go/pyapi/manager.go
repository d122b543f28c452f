package pyapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/pyapi/rank"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/recovery"
	"github.com/torchft/torchft/go/relay"
)

// ManagerServerStart connects to the lighthouse and serves; the result is a handle for Address and ReleaseStart.
func ManagerServerStart(replicaID, lighthouseAddr, hostname, bind, storeAddr string, worldSize, heartbeatIntervalUs, connectTimeoutUs, quorumRetries int64, security string) (op int64, err error) {
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
	// An address that cannot be connected to is a RuntimeError, whatever is wrong with it.
	if _, err := rpc.ParseAddresses("lighthouse_addr", lighthouseAddr); err != nil {
		return 0, err
	}
	if err := cfg.Validate(); err != nil {
		return 0, ops.As(ops.Value, err)
	}
	return ops.Start(cfg.ConnectTimeout+bindTimeout, func(ctx context.Context) (any, error) {
		server, err := manager.NewServer(ctx, cfg)
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
		client, err := connect(ctx, addr, timeout, protected)
		return client, connectFailed(err)
	}), nil
}

// connect makes the client of a rank, which asks through its own relay where it has one.
func connect(ctx context.Context, addr string, timeout time.Duration, s settings) (_ *rank.Client, err error) {
	var own *relay.Relay
	if s.RelayHost != "" {
		own, err = relay.Start(ctx, relay.Config{
			Manager: addr, Hostname: s.RelayHost, Bind: "[::]:0", ConnectTimeout: timeout, Security: s.Security,
		})
		switch {
		case errors.Is(err, relay.ErrNone):
			slog.Default().Warn("torchft: this rank is no relay: those that would ask through it connect to the manager server", "error", err)
		case err != nil:
			return nil, err
		default:
			s.Relay = own.Address()
		}
	}
	client, err := rankclient.Dial(ctx, addr, timeout, rankclient.WithSecurity(s.Security), rankclient.WithRelay(s.Relay))
	if err != nil {
		if own != nil {
			_ = own.Close()
		}
		return nil, err
	}
	return rank.New(client, own), nil
}

// ManagerQuorumStart waits for the group and for the lighthouse; request is the JSON of rankclient.Request, the result that of
// quorumResult.
func ManagerQuorumStart(handle int64, request string, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	client, err := ops.Get[*rank.Client](handle)
	if err != nil {
		return 0, err
	}
	req, err := parseRequest(request)
	if err != nil {
		return 0, err
	}
	return ops.Start(micros(timeoutUs), func(ctx context.Context) (any, error) {
		result, err := client.Quorum(client.Below(ctx), req)
		if err != nil {
			return nil, callFailed(err)
		}
		return toJSON(newQuorumResult(result))
	}), nil
}

// parseRequest refuses a field that is not known here: it would be lost.
func parseRequest(text string) (req rankclient.Request, err error) {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&req); err != nil {
		return req, ops.As(ops.Value, fmt.Errorf("request: %w", err))
	}
	return req, nil
}

// ManagerCheckpointMetadataStart asks what a group rank announced; the result is text.
func ManagerCheckpointMetadataStart(handle, groupRank, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	client, err := ops.Get[*rank.Client](handle)
	if err != nil {
		return 0, err
	}
	return ops.Start(micros(timeoutUs), func(ctx context.Context) (any, error) {
		metadata, err := client.CheckpointMetadata(ctx, groupRank)
		return metadata, callFailed(err)
	}), nil
}

// ManagerServerFinish is called before the server is released, where the training has ended on purpose.
func ManagerServerFinish(handle int64) (found bool, err error) {
	defer ops.Guard(&err)
	server, err := ops.Get[*manager.Server](handle)
	if err != nil {
		return false, err
	}
	server.Finish()
	return true, nil
}

// ManagerTrace is called before each quorum of a rank that traces, with the W3C trace context of the step, which its vote
// goes on with as well.
func ManagerTrace(handle int64, traceparent string) (found bool, err error) {
	defer ops.Guard(&err)
	client, err := ops.Get[*rank.Client](handle)
	if err != nil {
		return false, err
	}
	client.Trace.Store(&traceparent)
	return true, nil
}

// ManagerLeaveStart announces that the group has ended its last step, and waits until no peer needs it any more.
func ManagerLeaveStart(handle, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	client, err := ops.Get[*rank.Client](handle)
	if err != nil {
		return 0, err
	}
	return ops.Start(micros(timeoutUs), func(ctx context.Context) (any, error) {
		return nil, callFailed(client.Leave(ctx))
	}), nil
}

// connectFailed classes the error of a constructor: a peer that is not reached in time is no TimeoutError.
func connectFailed(err error) error {
	if err == nil {
		return nil
	}
	return ops.As(ops.Runtime, errors.New(rpc.Message(err)))
}

// callFailed classes the error of a call: its own deadline, or everything else.
func callFailed(err error) error {
	if rpc.IsTimeout(err) {
		return ops.As(ops.Timeout, err)
	}
	return err
}

// quorumResult is a result with the fields of its one source under the names of QuorumResult in torchft/_records.py.
type quorumResult struct {
	recovery.Result
	RecoverSrcManagerAddress string `json:"recover_src_manager_address"`
	RecoverSrcReplicaRank    *int64 `json:"recover_src_replica_rank"`
}

func newQuorumResult(r recovery.Result) quorumResult {
	q := quorumResult{Result: r}
	if len(r.Sources) > 0 {
		q.RecoverSrcManagerAddress = r.Sources[0].ManagerAddress
		q.RecoverSrcReplicaRank = &r.Sources[0].ReplicaRank
	}
	return q
}

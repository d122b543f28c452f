package pyapi

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/torchft/torchft/go/internal/rpc"
	"github.com/torchft/torchft/go/membership/lighthouses"
	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/quorum"
)

// LighthouseClientStart connects to a lighthouse; the result is a handle.
func LighthouseClientStart(addr string, connectTimeoutUs int64, security string) (op int64, err error) {
	defer ops.Guard(&err)
	protected, err := parseSecurity(security)
	if err != nil {
		return 0, err
	}
	timeout := micros(connectTimeoutUs)
	return ops.Start(timeout+bindTimeout, func(ctx context.Context) (any, error) {
		client, err := lighthouses.Dial(ctx, addr, timeout,
			rpc.Dialing{Security: protected.Security, Job: protected.Job})
		return client, connectFailed(err)
	}), nil
}

// LighthouseQuorumStart requests to be in the next quorum. member is the JSON of quorum.Member, the result is
// that of quorumJSON.
func LighthouseQuorumStart(handle int64, member string, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	var asks quorum.Member
	if err := json.Unmarshal([]byte(member), &asks); err != nil {
		return 0, ops.As(ops.Value, fmt.Errorf("member: %w", err))
	}
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *lighthouses.Client) (any, error) {
		q, err := c.Quorum(ctx, asks, 0)
		if err != nil {
			return nil, ops.CallFailed(err)
		}
		return toJSON(quorumJSON{q.ID, q.Members, timestampJSON{q.Created.Unix(), q.Created.Nanosecond()}})
	})
}

// LighthouseHeartbeatStart sends the heartbeat of a replica; there is no result.
func LighthouseHeartbeatStart(handle int64, replicaID string, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *lighthouses.Client) (any, error) {
		return nil, ops.CallFailed(c.Heartbeat(ctx, replicaID))
	})
}

// The JSON of a quorum has the attributes of Quorum and Timestamp in torchft/_records.py.
type (
	quorumJSON struct {
		QuorumID     int64           `json:"quorum_id"`
		Participants []quorum.Member `json:"participants"`
		Created      timestampJSON   `json:"created"`
	}
	timestampJSON struct {
		Seconds int64 `json:"seconds"`
		Nanos   int   `json:"nanos"`
	}
)

// toJSON returns a string. Its type is any because that is the type of an operation's result.
func toJSON(v any) (any, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("result: %w", err)
	}
	return string(text), nil
}

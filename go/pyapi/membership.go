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
		client, err := lighthouses.Dial(ctx, addr, timeout, rpc.Dialing{Security: protected.Security, Job: protected.Job})
		return client, connectFailed(err)
	}), nil
}

// LighthouseQuorumStart requests to be in the next quorum; the result is the JSON of that quorum.
func LighthouseQuorumStart(handle int64, replicaID, address, storeAddress string, step, worldSize int64, shrinkOnly bool, data string, timeoutUs int64) (op int64, err error) {
	member := quorum.Member{
		ReplicaID:    replicaID,
		Address:      address,
		StoreAddress: storeAddress,
		Step:         step,
		WorldSize:    uint64(worldSize),
		ShrinkOnly:   shrinkOnly,
		Data:         data,
	}
	return start(handle, micros(timeoutUs), func(ctx context.Context, client *lighthouses.Client) (any, error) {
		q, err := client.Quorum(ctx, member, 0)
		if err != nil {
			return nil, callFailed(err)
		}
		return toJSON(newQuorumJSON(q))
	})
}

// LighthouseHeartbeatStart sends the heartbeat of a replica; there is no result.
func LighthouseHeartbeatStart(handle int64, replicaID string, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, client *lighthouses.Client) (any, error) {
		return nil, callFailed(client.Heartbeat(ctx, replicaID))
	})
}

// The JSON of a quorum has the attributes of Quorum, QuorumMember and Timestamp in torchft/_records.py.
type (
	quorumJSON struct {
		QuorumID     int64         `json:"quorum_id"`
		Participants []memberJSON  `json:"participants"`
		Created      timestampJSON `json:"created"`
	}
	memberJSON struct {
		ReplicaID    string `json:"replica_id"`
		Address      string `json:"address"`
		StoreAddress string `json:"store_address"`
		Step         int64  `json:"step"`
		WorldSize    uint64 `json:"world_size"`
		ShrinkOnly   bool   `json:"shrink_only"`
		Data         string `json:"data"`
	}
	timestampJSON struct {
		Seconds int64 `json:"seconds"`
		Nanos   int   `json:"nanos"`
	}
)

func newQuorumJSON(q *quorum.Quorum) quorumJSON {
	j := quorumJSON{
		QuorumID:     q.ID,
		Participants: make([]memberJSON, 0, len(q.Members)),
		Created:      timestampJSON{q.Created.Unix(), q.Created.Nanosecond()},
	}
	for _, m := range q.Members {
		j.Participants = append(j.Participants, memberJSON{
			m.ReplicaID, m.Address, m.StoreAddress, m.Step, m.WorldSize, m.ShrinkOnly, m.Data,
		})
	}
	return j
}

// toJSON returns a string. Its type is any because that is the type of an operation's result.
func toJSON(v any) (any, error) {
	text, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("result: %w", err)
	}
	return string(text), nil
}

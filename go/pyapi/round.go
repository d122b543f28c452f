package pyapi

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/protobuf/encoding/protojson"

	"github.com/torchft/torchft/go/manager"
	"github.com/torchft/torchft/go/pyapi/ops"
	"github.com/torchft/torchft/go/rankclient"
	"github.com/torchft/torchft/go/torchftpb"
)

// ManagerRoundStart waits for the group and for the lighthouse. request is the JSON of a
// torchftpb.ManagerQuorumRequest, the result that of the response.
func ManagerRoundStart(handle int64, request string, timeoutUs int64) (op int64, err error) {
	defer ops.Guard(&err)
	req := &torchftpb.ManagerQuorumRequest{}
	if err := protojson.Unmarshal([]byte(request), req); err != nil {
		return 0, ops.As(ops.Value, fmt.Errorf("request: %w", err))
	}
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *rankclient.Client) (any, error) {
		result, err := c.Quorum(ctx, req)
		if err != nil {
			return nil, ops.CallFailed(err)
		}
		return toJSON(result) // with protojson, Python would get its numbers as texts
	})
}

// ManagerNoticeStart waits for a notice of the lighthouse: a member failed or stalled, the job regresses, or
// the lighthouse asks for the progress of this rank. The result is the JSON of notice, or nil if there was
// none within the timeout.
func ManagerNoticeStart(handle, timeoutUs int64) (op int64, err error) {
	return start(handle, micros(timeoutUs), func(ctx context.Context, c *rankclient.Client) (any, error) {
		select {
		case n := <-c.Notices():
			return toJSON(notice{kinds[n.GetKind()], n.GetQuorumId(), n.GetReplicaId(), n.GetReason(),
				n.GetStep()})
		case <-c.Closed():
			return nil, errors.New("the client is closed")
		case <-ctx.Done():
			return nil, nil
		}
	})
}

// ManagerReport sends a report of this rank, which is not answered: the JSON of one of the requests in
// torchftpb.RankRequest that have no answer. It is sent on a goroutine, so that Python does not wait for the
// network.
func ManagerReport(handle int64, report string) (found bool, err error) {
	defer ops.Guard(&err)
	request := &torchftpb.RankRequest{}
	if err := protojson.Unmarshal([]byte(report), request); err != nil {
		return false, ops.As(ops.Value, fmt.Errorf("report: %w", err))
	}
	if counted := request.GetCounted(); counted != nil {
		if err := manager.ValidateCounted(counted); err != nil {
			return false, ops.As(ops.Value, err)
		}
	}
	return with(handle, func(client *rankclient.Client) (bool, error) {
		go client.Report(request)
		return true, nil
	})
}

// kinds are the names of notices in Python.
var kinds = map[torchftpb.Notice_Kind]string{
	torchftpb.Notice_MEMBER_FAILED: "failed", torchftpb.Notice_STALLED: "stalled",
	torchftpb.Notice_PROGRESS_ASKED: "progress", torchftpb.Notice_REGRESSED: "regressed",
	torchftpb.Notice_JUDGED: "judged", torchftpb.Notice_STOPPED: "stopped",
}

// notice is the JSON of a notice. The fields other than kind are the attributes of MemberFailure in
// torchft/_records.py, with the same names.
type notice struct {
	Kind      string `json:"kind"`
	QuorumID  int64  `json:"quorum_id"`
	ReplicaID string `json:"replica_id"`
	Reason    string `json:"reason"`
	Step      int64  `json:"step"`
}

-- The demo's source of trace events: containers of an invented plant, and what happened to them.
-- Applied by `python -m migrations --demo` only, as often as that is run; filled by
-- `python -m worker.demo_trace load`.
--
-- Ids sort bytewise. No foreign keys: a history outlives its masters, and loads stay fast.

CREATE SCHEMA IF NOT EXISTS trace_demo;

-- What is loaded; a row from the first to the last moment in which all of it is there.
CREATE TABLE IF NOT EXISTS trace_demo.load (
    cids  integer NOT NULL,
    seed  bigint NOT NULL
);

CREATE TABLE IF NOT EXISTS trace_demo.container (
    container_id           text COLLATE "C" NOT NULL,
    container_name         text COLLATE "C" NOT NULL,
    object_type            text NOT NULL,
    mfg_order_name         text NOT NULL,
    first_name             text,
    original_container_id  text COLLATE "C",
    split_from_id          text COLLATE "C",
    owner_name             text,
    product_name           text,
    product_line_name      text,
    pj_type                text,
    pj_bop                 text,
    original_qty           integer,
    qty                    integer,
    status                 text,
    original_start_at      timestamptz,
    last_activity_at       timestamptz
);
CREATE TABLE IF NOT EXISTS trace_demo.lot_wip_history (
    event_id          bigint NOT NULL,
    container_id      text COLLATE "C" NOT NULL,
    workorder         text,
    workcenter_name   text,
    spec_name         text,
    equipment_id      text,
    equipment_name    text,
    move_in_at        timestamptz,
    move_in_qty       integer,
    track_in_at       timestamptz,
    track_in_qty      integer,
    track_out_at      timestamptz,
    track_out_qty     integer,
    move_out_at       timestamptz,
    move_out_qty      integer,
    finished_runcard  text
);
CREATE TABLE IF NOT EXISTS trace_demo.lot_materials_history (
    event_id            bigint NOT NULL,
    container_id        text COLLATE "C" NOT NULL,
    workorder           text,
    workcenter_name     text,
    spec_name           text,
    equipment_name      text,
    material_part_name  text,
    material_lot_name   text,
    description         text,
    qty_required        numeric,
    qty_consumed        numeric,
    txn_at              timestamptz
);
CREATE TABLE IF NOT EXISTS trace_demo.lot_reject_history (
    event_id          bigint NOT NULL,
    container_id      text COLLATE "C" NOT NULL,
    workorder         text,
    workcenter_name   text,
    spec_name         text,
    equipment_name    text,
    loss_reason_name  text,
    reject_category   text,
    reject_qty        integer,
    standby_qty       integer,
    qty_to_process    integer,
    in_process_qty    integer,
    processed_qty     integer,
    defect_qty        integer,
    shift_name        text,
    reject_comment    text,
    txn_at            timestamptz
);
CREATE TABLE IF NOT EXISTS trace_demo.hold_release_history (
    event_id          bigint NOT NULL,
    container_id      text COLLATE "C" NOT NULL,
    workorder         text,
    workcenter_name   text,
    from_spec_name    text,
    qty               integer,
    hold_at           timestamptz,
    release_at        timestamptz,
    hold_emp          text,
    hold_dept         text,
    hold_reason       text,
    hold_comments     text,
    release_emp       text,
    release_comments  text,
    ncr_id            text
);
CREATE TABLE IF NOT EXISTS trace_demo.equipment_job (
    job_id          text COLLATE "C" NOT NULL,
    resource_id     text,
    resource_name   text,
    job_status      text,
    job_model_name  text,
    job_order_name  text,
    created_at      timestamptz,
    completed_at    timestamptz,
    cause_code      text,
    repair_code     text,
    symptom_code    text
);
CREATE TABLE IF NOT EXISTS trace_demo.equipment_job_container (
    container_id  text COLLATE "C" NOT NULL,
    job_id        text COLLATE "C" NOT NULL
);
CREATE TABLE IF NOT EXISTS trace_demo.combined_assy_lot (
    finished_container_id  text COLLATE "C" NOT NULL,
    source_container_id    text COLLATE "C" NOT NULL,
    finished_name          text,
    good_die_qty           integer,
    excess_qty             integer,
    combined_ratio         numeric,
    original_start_at      timestamptz
);
CREATE TABLE IF NOT EXISTS trace_demo.spec_workcenter (
    spec_name          text PRIMARY KEY,
    work_center        text,
    work_center_group  text,
    sequence_group     integer
);
